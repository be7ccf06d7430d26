"""The gradient, sublayer by sublayer."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from normscale.probes.probe import Array, Hand, Probe, Reading, Subject


def depth_slope(profile: Array) -> float:
    """Returns the least-squares slope of log(profile) over log(1, 2, ..., n); NaN where it has none.

    Zeros and non-finite entries are left out: a vanished gradient has no logarithm. `grad_min_end` tells of them.

    Shape: profile [n].
    """
    position = np.arange(1, len(profile) + 1)
    usable = np.isfinite(profile) & (profile > 0)
    if usable.sum() < 2:
        return float("nan")
    return float(np.polyfit(np.log(position[usable]), np.log(profile[usable]), 1)[0])


class Gradients(Probe):
    """L2 norm of the reduced gradient of each sublayer's parameters (branch and norm), before clipping."""

    name = "gradients"

    def attach(self, subject: Subject) -> None:
        self.measure = subject.gradient_squares
        self.squares: Tensor | None = None

    def after_backward(self) -> None:
        self.squares = self.measure()

    def hand_over(self) -> Mapping[str, Hand]:
        return {} if self.squares is None else {"squares": Hand(self.squares, "first")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        if "squares" not in values:
            return Reading()
        norms = np.sqrt(values["squares"])
        scalars = {
            "grad_first": float(norms[0]),
            "grad_last": float(norms[-1]),
            "grad_p50": float(np.median(norms)),
        }
        return Reading(scalars, {"grad_norm": norms})
