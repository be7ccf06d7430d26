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
    """L2 norm of the reduced gradient of each sublayer's parameters (branch and norm), before clipping.

    With the smallest and the largest of the finite ones, where these stand, and the slope over depth (`depth_slope`).
    And the norm of the output matrix of the last feed-forward sublayer alone, of which theory speaks.

    Reference: Xiong et al. 2020, arXiv:2002.04745, Theorem 1 (the last).
    """

    name = "gradients"

    def attach(self, subject: Subject) -> None:
        self.measure, self.measure_last_out = subject.gradient_squares, subject.last_out_square
        self.combined = subject.combined
        self.squares: Tensor | None = None
        self.last_out: Tensor | None = None

    def after_backward(self) -> None:
        self.squares = self.measure()
        self.last_out = self.measure_last_out() if self.measure_last_out else None

    def hand_over(self) -> Mapping[str, Hand]:
        hands = {"squares": self.squares, "last_out": self.last_out}
        return {name: Hand(values, self.combined) for name, values in hands.items() if values is not None}

    def read(self, values: Mapping[str, Array]) -> Reading:
        if "squares" not in values:
            return Reading()
        norms = np.sqrt(values["squares"])
        scalars = {
            "grad_first": float(norms[0]),
            "grad_last": float(norms[-1]),
            "grad_p50": float(np.median(norms)),
        }
        finite = np.isfinite(norms)
        if finite.any():
            least, most = np.where(finite, norms, np.inf).argmin(), np.where(finite, norms, -np.inf).argmax()
            scalars |= {"grad_min": float(norms[least]), "grad_max": float(norms[most])}
            scalars |= {"grad_argmin": float(least), "grad_argmax": float(most)}
        slope = depth_slope(norms)
        if np.isfinite(slope):
            scalars["grad_slope_now"] = slope
        if "last_out" in values:
            scalars["grad_last_out"] = float(np.sqrt(values["last_out"][0]))
        return Reading(scalars, {"grad_norm": norms})
