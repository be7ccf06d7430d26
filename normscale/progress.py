"""How far a run is, as a person reads it: one rewritten line on a terminal, else a line every ten seconds."""

import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, Self, TextIO

QUIET_S = 10.0  # between lines in a log
LIVELY_S = 0.1  # between rewrites on a terminal

Say = Callable[[str], None]
"""Is told what is being done now."""


def duration(seconds: float) -> str:
    """Returns a time as 0:07, 12:34 or 1:02:03."""
    minutes, left = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def figure(quantity: float) -> str:
    """Returns a number with two digits, as in 0.027 or 2.7; from ten on all that are before its point."""
    return f"{quantity:,.0f}" if abs(quantity) >= 9.95 else f"{quantity:.2g}"


class Progress:
    """Says step, loss, time a step and time left. Call it once a step; `end` finishes a rewritten line."""

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out or sys.stdout
        self._clock = clock
        self._lively = self._out.isatty()
        self._first: tuple[int, float] | None = None
        self._said = float("-inf")
        self._open = False

    def __call__(self, step: int, steps: int, loss: float) -> None:
        """Notes that `step` of `steps` ended with this training loss, and says so when it is time to."""
        now = self._clock()
        if self._first is None:  # the step that compiles and allocates is not what the others take
            self._first = (step, now)
        pause = LIVELY_S if self._lively else QUIET_S
        if now - self._said < pause and step < steps:
            return
        self._said = now
        line = f"step {step}/{steps}  loss {loss:.3f}"
        begun, since = self._first
        if step > begun:
            each = (now - since) / (step - begun)
            line += f"  {1000 * each:.0f} ms/step  {duration(each * (steps - step))} left"
        self._out.write(f"\r\x1b[K{line}" if self._lively else f"{line}\n")
        self._out.flush()
        self._open = self._lively

    def end(self) -> None:
        """Ends the line that was being rewritten, so that the next output starts on its own."""
        if self._open:
            self._out.write("\n")
            self._out.flush()
            self._open = False


def quiet(what: str) -> None:
    """Says nothing."""


class Doing:
    """Says on stderr what a command does now, and since when it has been at work, in a `with` around the work.

    On a terminal it is one line, rewritten and taken away at the end; else a line at most every ten seconds.
    """

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock = out or sys.stderr, clock
        self._lively = self._out.isatty()
        self._begun = self._said = clock()

    def __call__(self, what: str) -> None:
        """Says it; in a log, when it is time to."""
        now = self._clock()
        if not self._lively and now - self._said < QUIET_S:
            return
        self._said = now
        line = f"{what}  {duration(now - self._begun)} gone"
        if self._lively:
            line = f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}"
        self._out.write(line if self._lively else f"{line}\n")
        self._out.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._lively:
            self._out.write("\r\x1b[K")
            self._out.flush()
