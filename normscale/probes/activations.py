"""The size of the residual stream and of the branches, site by site."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from normscale.probes.probe import Array, Hand, Probe, Reading, Subject


class Activations(Probe):
    """RMS, largest absolute value and non-finite count of every branch and stream, over the whole step.

    The model fills one row for each branch and stream as it runs (`ops.statistics`); micro-batches are folded here,
    on the device. Of a scheme with several streams the first is reported.
    """

    name = "activations"

    def attach(self, subject: Subject) -> None:
        self.sites, self.per_site, self.width = len(subject.sites), 1 + subject.streams, subject.width
        shape = self.sites * self.per_site
        self.rows = torch.zeros(shape, 3, device=subject.device)
        self.sums = torch.zeros(shape, 2, device=subject.device)
        self.maxima = torch.zeros(shape, device=subject.device)
        self.sides = [site.partition(".")[0] for site in subject.sites]

    def forward_rows(self) -> Tensor | None:
        return self.rows

    def begin(self, step: int) -> None:
        self.sums.zero_()
        self.maxima.zero_()
        self.positions = dict.fromkeys(("encoder", "decoder"), 0)

    def after_micro_batch(self, positions: Mapping[str, int]) -> None:
        self.sums += self.rows[:, 0::2]
        torch.maximum(self.maxima, self.rows[:, 1], out=self.maxima)
        for side, count in positions.items():
            self.positions[side] += count

    def hand_over(self) -> Mapping[str, Hand]:
        return {
            "sums": Hand(self.sums, "sum"),
            "positions": Hand(torch.tensor([*map(float, self.positions.values())], device=self.sums.device), "sum"),
            "maxima": Hand(self.maxima, "max"),
        }

    def read(self, values: Mapping[str, Array]) -> Reading:
        squares, nonfinite = values["sums"].reshape(self.sites, self.per_site, 2).transpose(2, 0, 1)
        absmax = values["maxima"].reshape(self.sites, self.per_site)
        counts = dict(zip(self.positions, values["positions"], strict=True))
        rms = np.sqrt(squares / (np.array([[counts[side]] for side in self.sides]) * self.width))
        branch, stream = rms[:, 0], rms[:, 1]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = float(np.median(branch / stream))
        scalars = {
            "stream_first": float(stream[0]),
            "stream_last": float(stream[-1]),
            "stream_max": float(absmax[:, 1].max()),
            "branch_p50": ratio,
        }
        profiles = {
            "stream_rms": stream,
            "stream_absmax": absmax[:, 1],
            "stream_nonfinite": nonfinite[:, 1],
            "branch_rms": branch,
            "branch_absmax": absmax[:, 0],
            "branch_nonfinite": nonfinite[:, 0],
        }
        return Reading(scalars, profiles)
