"""The spike score of a series."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

WARM_UP = 30  # values before the first that can be a spike


class SpikeScore:
    """The share of values that lie `sigmas` standard deviations or more, up or down, from the mean of those before.

    "Before" are the last `window` values; the first `WARM_UP` values (`window`, if that is less) cannot be spikes,
    unless they are not finite. A value that is not finite is a spike and does not enter the window. Deviations below a
    ten-thousandth of the mean are rounding, not spikes.

    Reference: OLMo 2, arXiv:2501.00656, section 3.1 (7 standard deviations, window 1000); its trainer's
    StabilityMonitorCallback has 6 and 128, which are the defaults here. It differs from this: it counts values above
    the mean alone, begins when its window is full, leaves deviations below 1e-10 out, and has one score for the loss
    and the gradient norm together.
    """

    def __init__(self, sigmas: float = 6.0, window: int = 128) -> None:
        self.sigmas, self.warm_up = sigmas, min(WARM_UP, window)
        self.past: deque[float] = deque(maxlen=window)
        self.spikes = self.count = 0
        self.distance = 0.0  # of the last value that was compared, in standard deviations

    def add(self, value: float) -> bool:
        """Takes the next value of the series; returns whether it is a spike."""
        finite = math.isfinite(value)
        spike = not finite or (len(self.past) >= self.warm_up and self._far(value))
        self.count += 1
        self.spikes += spike
        if finite:
            self.past.append(value)
        return spike

    @property
    def score(self) -> float:
        """The share of spikes among all values so far."""
        return self.spikes / self.count if self.count else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Returns what has to survive a restart."""
        return {"past": list(self.past), "spikes": self.spikes, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.past = deque(state["past"], maxlen=self.past.maxlen)
        self.spikes, self.count = state["spikes"], state["count"]

    def _far(self, value: float) -> bool:
        mean = math.fsum(self.past) / len(self.past)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in self.past) / len(self.past))
        far = abs(value - mean)
        self.distance = far / deviation if deviation else math.inf
        return far >= self.sigmas * deviation and far > 1e-4 * abs(mean)
