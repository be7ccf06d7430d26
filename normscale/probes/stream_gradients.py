"""The gradient of the residual stream, site by site."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from normscale.probes.lengths import within
from normscale.probes.probe import Array, Hand, Probe, Reading, Subject
from normscale.probes.sending import sent


class StreamGradients(Probe):
    """L2 norm, largest absolute value and non-finite count of the gradient of the stream after each site.

    What is differentiated is the mean loss over the targets of the global batch; the norm is over all positions of all
    micro-batches and ranks together. Each of them holds its own part of that gradient, so that squares add up: neither
    accumulation nor ranks nor a loss scale change the number. The stream of a scheme with several is the first of them;
    of the others the largest norm is reported.
    Where entries are so small that fp32 does not hold their squares, below 1e-22, the norm is given as that of the
    largest one: the true norm is not less.
    """

    name = "stream_gradients"

    def attach(self, subject: Subject) -> None:
        self.sites, self.per_site, self.streams = len(subject.sites), subject.rows_per_site, subject.streams
        count = self.sites * self.per_site
        self.rows = torch.zeros(count, 3, dtype=torch.float32, device=subject.device)
        self.sums = torch.zeros(count, 2, dtype=torch.float64, device=subject.device)
        self.maxima = torch.zeros(count, dtype=torch.float32, device=subject.device)
        self.factor = 1.0

    def buffers(self) -> Mapping[str, Tensor]:
        return {"grad_rows": self.rows}

    def begin(self, step: int) -> None:
        self.rows.zero_()
        self.sums.zero_()
        self.maxima.zero_()

    def scaled_by(self, factor: float) -> None:
        self.factor = factor

    def after_micro_batch(self, positions: Mapping[str, int]) -> None:
        self.sums += self.rows[:, 0::2]
        torch.maximum(self.maxima, self.rows[:, 1], out=self.maxima)
        self.rows.zero_()  # a stream that gets no gradient the next time must not count this one again

    def hand_over(self) -> Mapping[str, Hand]:
        factor = sent([self.factor], self.sums.device)
        return {"sums": Hand(self.sums, "sum"), "maxima": Hand(self.maxima, "max"), "factor": Hand(factor, "first")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        squares, nonfinite = values["sums"].reshape(self.sites, self.per_site, 2).transpose(2, 0, 1)
        factor = values["factor"][0]
        absmax = values["maxima"].reshape(self.sites, self.per_site) / factor
        norms = within(np.sqrt(squares) / factor, squares, absmax, np.inf)
        profiles = {
            "stream_grad_norm": norms[:, 1],
            "stream_grad_absmax": absmax[:, 1],
            "stream_grad_nonfinite": nonfinite[:, 1],
        }
        if self.streams > 1:
            profiles["other_stream_grad_norm"] = norms[:, 2 : 1 + self.streams].max(axis=1)
        return Reading(profiles=profiles)
