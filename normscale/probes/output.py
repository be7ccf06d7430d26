"""The normaliser of the output softmax."""

from collections.abc import Mapping

import torch
from torch import Tensor

from normscale.probes.probe import Array, Hand, Probe, Reading, Subject


class OutputSoftmax(Probe):
    """log Z = log sum exp of the logits, in nats: its mean and its maximum over the targets of the step.

    Logits may drift together without any change of the loss; half precision and a loss on log Z care. A target below 0
    is none.

    Reference: Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, section 5 (z-loss).
    """

    name = "output"

    def attach(self, subject: Subject) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device=subject.device)
        self.largest = torch.zeros((), dtype=torch.float32, device=subject.device)

    def begin(self, step: int) -> None:
        self.sums.zero_()
        self.largest.fill_(-torch.inf)

    def after_forward(self, logits_BTV: Tensor, targets_BT: Tensor) -> None:
        with torch.no_grad():
            self.add(logits_BTV.float().logsumexp(dim=-1), targets_BT >= 0)

    def add(self, log_z: Tensor, counts: Tensor) -> None:
        """Takes log Z at positions, of which some count.

        Shape: log_z, counts alike.
        """
        self.sums[0] += log_z.masked_fill(~counts, 0.0).sum(dtype=torch.float64)
        self.sums[1] += counts.sum()
        torch.maximum(self.largest, log_z.masked_fill(~counts, -torch.inf).amax(), out=self.largest)

    def hand_over(self) -> Mapping[str, Hand]:
        return {"sums": Hand(self.sums, "sum"), "largest": Hand(self.largest, "max")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        total, count = values["sums"]
        return Reading({"logz_mean": float(total / count), "logz_max": float(values["largest"][0])})
