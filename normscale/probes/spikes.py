"""The spike score of a series."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any


class SpikeScore:
    """The share of values that lie more than `sigmas` standard deviations, up or down, from the mean of those before.

    "Before" are the last `window` values; the first `warmup` values cannot be spikes, unless they are not finite. A
    value that is not finite is a spike and does not enter the window. Deviations below a ten-thousandth of the mean
    are rounding, not spikes.

    Reference: OLMo 2, arXiv:2501.00656, section 3.1 (7 standard deviations, window 1000).
    """

    def __init__(self, sigmas: float = 7.0, window: int = 1000, warmup: int = 30) -> None:
        self.sigmas, self.warmup = sigmas, warmup
        self.past: deque[float] = deque(maxlen=window)
        self.spikes = self.count = 0

    def add(self, value: float) -> None:
        """Takes the next value of the series."""
        finite = math.isfinite(value)
        self.count += 1
        self.spikes += not finite or (len(self.past) >= self.warmup and self._far(value))
        if finite:
            self.past.append(value)

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
        return abs(value - mean) > max(self.sigmas * deviation, 1e-4 * abs(mean))
