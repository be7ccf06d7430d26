"""How far a step moves the weights, sublayer by sublayer."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from normscale.probes.probe import Array, Hand, Probe, Reading, Subject
from normscale.probes.segments import SiteSquares

ENTRIES = 2**19
"""That are looked at in all: 2 MB of fp32 are kept from the backward pass to the end of the step; at 1000 blocks, of
whose every stretch `segments.LEAST` are taken, 10 MB."""


class WeightUpdates(Probe):
    """||theta_(t+1) - theta_t|| / ||theta_t|| over the parameters of each sublayer (branch and norm).

    It is what the optimizer and, where the scheme has one, the projection after it have done; 0 for a step that was not
    applied. Of a model with more than `ENTRIES` parameters it is an estimate, over entries spread evenly over each
    sublayer: a copy of all of them would cost a small batch a twentieth of its step.
    """

    name = "weights"

    def attach(self, subject: Subject) -> None:
        assert subject.parameters is not None
        self.values, self.squares = subject.parameters.values, SiteSquares(subject.parameters, ENTRIES)
        self.sites, self.combined = len(subject.sites), subject.combined
        self.before: list[Tensor] | None = None
        self.sums: Tensor | None = None

    def begin(self, step: int) -> None:
        self.before = self.sums = None

    def after_backward(self) -> None:
        self.before = [part.detach().clone() for part in self.squares.parts(self.values())]

    def after_step(self, step: int) -> None:
        if self.before is not None:
            with torch.no_grad():
                lengths = self.squares.sums(self.before)
                after = self.squares.parts(self.values())
                moved = [old.sub_(new) for old, new in zip(self.before, after, strict=True)]
                self.sums = torch.cat([self.squares.sums(moved), lengths])
        self.before = None

    def hand_over(self) -> Mapping[str, Hand]:
        return {} if self.sums is None else {"sums": Hand(self.sums, self.combined)}

    def read(self, values: Mapping[str, Array]) -> Reading:
        if "sums" not in values:
            return Reading()
        moved, length = values["sums"].reshape(2, self.sites)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(length > 0, np.sqrt(moved / length), np.nan)
        scalars = {}
        if np.isfinite(ratio).any():
            scalars = {"update_rel_p50": float(np.nanmedian(ratio)), "update_rel_max": float(np.nanmax(ratio))}
        return Reading(scalars, {"update_rel": ratio})
