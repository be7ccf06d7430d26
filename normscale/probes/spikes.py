"""The spike score of a series."""

import math
from collections import deque


class SpikeScore:
    """The share of values that lie at least `sigmas` standard deviations from the mean of the last `window` values.

    Values are judged once `warmup` earlier ones are known. A value that is not finite is a spike and does not enter
    the window.

    Reference: OLMo 2, arXiv:2501.00656, section 3.1 (7 standard deviations, window 1000).
    """

    def __init__(self, sigmas: float = 7.0, window: int = 1000, warmup: int = 30) -> None:
        self.sigmas, self.warmup = sigmas, warmup
        self.past: deque[float] = deque(maxlen=window)
        self.spikes = self.judged = 0

    def add(self, value: float) -> None:
        """Takes the next value of the series."""
        finite = math.isfinite(value)
        if len(self.past) >= self.warmup or not finite:
            self.judged += 1
            self.spikes += not finite or self._far(value)
        if finite:
            self.past.append(value)

    @property
    def score(self) -> float:
        """The share of spikes among the judged values; 0 where none was judged."""
        return self.spikes / self.judged if self.judged else 0.0

    def _far(self, value: float) -> bool:
        mean = math.fsum(self.past) / len(self.past)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in self.past) / len(self.past))
        return abs(value - mean) > self.sigmas * deviation
