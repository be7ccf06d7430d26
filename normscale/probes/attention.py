"""How large attention's logits are and how widely it looks, site by site."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from normscale.probes.probe import Array, Hand, Probe, Reading, Subject


class Attention(Probe):
    """Largest attention logit and mean entropy of the attention weights, in nats, on sampled queries.

    The queries are `ops.sampled.places`, with all their heads. Rows are sites; those without attention are NaN. The
    entropy is averaged over queries, heads, micro-batches and ranks; `attn_entropy_min` is the smallest such mean.

    Reference: Zhai et al. 2023, arXiv:2303.06296, section 3 (entropy collapse); Dehghani et al. 2023, arXiv:2302.05442,
    section 2.1 (logits that grow).
    """

    name = "attention"

    def attach(self, subject: Subject) -> None:
        self.sites = len(subject.sites)
        self.where = [i for i, site in enumerate(subject.sites) if not site.endswith(".ffn")]
        self.rows = torch.zeros(self.sites * subject.rows_per_site, 2, dtype=torch.float32, device=subject.device)
        self.index = torch.tensor(self.where, device=subject.device) * subject.rows_per_site
        self.sums = torch.zeros(len(self.where) + 1, dtype=torch.float64, device=subject.device)
        self.maxima = torch.zeros(len(self.where), dtype=torch.float32, device=subject.device)

    def buffers(self) -> Mapping[str, Tensor]:
        return {"attention": self.rows}

    def begin(self, step: int) -> None:
        self.sums.zero_()
        self.maxima.fill_(-torch.inf)

    def after_micro_batch(self, positions: Mapping[str, int]) -> None:
        rows = self.rows[self.index]
        torch.maximum(self.maxima, rows[:, 0], out=self.maxima)
        self.sums[:-1] += rows[:, 1]
        self.sums[-1] += 1

    def hand_over(self) -> Mapping[str, Hand]:
        return {"sums": Hand(self.sums, "sum"), "maxima": Hand(self.maxima, "max")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        largest, entropy = np.full(self.sites, np.nan), np.full(self.sites, np.nan)
        largest[self.where] = values["maxima"]
        entropy[self.where] = values["sums"][:-1] / values["sums"][-1]
        scalars = {
            "attn_logit_max": float(largest[self.where].max()),
            "attn_entropy_min": float(entropy[self.where].min()),
        }
        return Reading(scalars, {"attn_logit_max": largest, "attn_entropy": entropy})
