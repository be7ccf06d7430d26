"""How far a set of runs is, with the time left: a rewritten line on a terminal, else a line every ten seconds."""

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from normscale.claims.workers import Job, speed_of
from normscale.progress import QUIET_S, duration

LIVELY_S = 0.5


def time_left(jobs: Sequence[Job], workers: int, speed: float = 1.0) -> float:
    """Returns the seconds until the last job ends; `speed` is estimated seconds worked off per real second.

    The longest job bounds it from below, however many workers there are.
    """
    left = [job.cost * (1 - job.share) for job in jobs if job.outcome is None]
    return max([sum(left) / max(1, workers), *left], default=0.0) / speed


class RunsProgress:
    """Says how many runs are done, the share of the work, and the time left."""

    def __init__(
        self,
        jobs: Sequence[Job],
        workers: int,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs, self._workers = jobs, workers
        self._out, self._clock = out or sys.stdout, clock
        self._lively = self._out.isatty()
        self._begun = self._said = clock()
        self._total = sum(job.cost for job in jobs) or 1.0

    def __call__(self, running: Sequence[Job], ended: Job | None = None) -> None:
        """Says where things stand when it is time to; a run without a result is said at once."""
        if ended is not None and ended.outcome != "done":
            self._line(f"{ended.name}: {ended.outcome}: {ended.note}")
        now = self._clock()
        if now - self._said >= (LIVELY_S if self._lively else QUIET_S):
            self._said = now
            line = self.line(running)
            if self._lively:
                width = shutil.get_terminal_size().columns
                self._out.write(f"\r\x1b[K{line[: width - 1]}")
                self._out.flush()
            else:
                self._line(line)

    def line(self, running: Sequence[Job]) -> str:
        """Returns e.g. `12/40 runs  31 %  1:10 gone  2:30 left  L0100 post s0 60 %, ...`."""
        elapsed = self._clock() - self._begun
        worked = sum(job.cost * job.share for job in self._jobs)
        speed = speed_of(self._jobs, self._workers, elapsed)
        done = sum(job.outcome is not None for job in self._jobs)
        left = duration(time_left(self._jobs, self._workers, speed))
        now = ", ".join(f"{job.name} {job.share:.0%}" for job in running)
        share = f"{worked / self._total:4.0%}"
        return f"{done}/{len(self._jobs)} runs {share}  {duration(elapsed)} gone  {left} left  {now}".rstrip()

    def end(self) -> None:
        """Ends the line that was being rewritten."""
        if self._lively:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def _line(self, line: str) -> None:
        self._out.write(f"\r\x1b[K{line}\n" if self._lively else f"{line}\n")
        self._out.flush()
