"""How far activations are from the largest number of the format they are computed in, and when they will reach it."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from normscale.probes.probe import Array, Reading

LAST = 8  # measured steps that a forecast looks back on
LEAST = 4  # and those it needs
SURE = 2.0  # a slope is one when it is so many times its own standard error
FARTHEST = 1e6  # steps: what is to come later is rounding, not a forecast


class Headroom:
    """log2(largest number / largest entry) of every site, in bits, and a forecast for the site that has the least.

    A branch overflows in the format of products, a stream in its own, and in that of products too where branches read
    it as it is: an fp32 stream beside fp16 products can pass their largest number unharmed as long as only norms read
    it. Where fp8 is rounded to, tensors are scaled one by one and cannot overflow; what can are the results, in bf16.

    The forecast is a least-squares line through the last measured steps' headroom of that site: growth by a constant
    factor a step overflows where the line meets 0.
    """

    def __init__(self, largest: float, sites: int) -> None:
        self.most = float(np.log2(largest))
        # What is not there is infinite and not NaN: two states that are the same then compare as such.
        self.steps = np.full(LAST, np.inf)
        self.bits = np.full((LAST, sites), np.inf)

    def read(self, step: int, absmax: Array) -> Reading:
        """Takes what was measured at `step`.

        Shape: absmax [sites]; an entry that is 0 has no headroom that could be told, one that is not finite has -Inf.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            bits = np.where(absmax > 0, self.most - np.log2(absmax), np.nan)
        finite = np.isfinite(bits)
        self.steps, self.bits = np.roll(self.steps, -1), np.roll(self.bits, -1, axis=0)
        self.steps[-1], self.bits[-1] = step, np.where(finite, bits, np.inf)
        scalars: dict[str, float] = {}
        if finite.any() and not np.isneginf(bits).any():
            least = int(np.nanargmin(bits))
            scalars = {"headroom": float(bits[least]), "headroom_layer": float(least)}
            left = steps_left(self.steps, self.bits[:, least])
            if left is not None:
                scalars["overflow_in"] = left
        return Reading(scalars, {"headroom_bits": bits})

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what has to survive a restart."""
        return {"steps": torch.from_numpy(self.steps.copy()), "bits": torch.from_numpy(self.bits.copy())}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state_dict` gave."""
        self.steps, self.bits = (state[name].cpu().double().numpy().copy() for name in ("steps", "bits"))


def steps_left(steps: Array, bits: Array) -> float | None:
    """Returns in how many steps after the last a line through the headroom meets 0; None where that is not foreseeable.

    Points that are not finite are left out. Fewer than `LEAST`, a slope within its own uncertainty, or headroom that
    does not shrink say nothing.

    Shape: steps, bits [n].
    """
    usable = np.isfinite(steps) & np.isfinite(bits)
    if not usable[-1] or usable.sum() < LEAST:
        return None
    ago, left = steps[usable] - steps[-1], bits[usable]
    spread = ((ago - ago.mean()) ** 2).sum()
    slope = float(((ago - ago.mean()) * (left - left.mean())).sum() / spread)
    now = float(left.mean() - slope * ago.mean())
    residual = left - (now + slope * ago)
    error = float(np.sqrt((residual**2).sum() / (len(ago) - 2) / spread))
    if slope >= 0 or -slope <= SURE * error:
        return None
    ahead = max(0.0, now / -slope)
    return ahead if ahead <= FARTHEST else None
