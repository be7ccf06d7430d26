"""A machine that is taken back: the signal that says so lets the step end, and the run go on elsewhere from there."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from normscale.arguments import STOPPED_ELSEWHERE, Stopped

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_S = 5.0  # a scheduler's signal comes again by way of each agent that passes it on


class Preempted(Stopped):
    """A run ended where a signal asked it to, with a checkpoint; the code is the one that schedulers start it anew on.

    Every rank raises it, whichever got the signal, and rank `speaker` prints it.
    """

    speaker = 0

    def __init__(self, step: int, number: int | None) -> None:
        stopped = STOPPED_ELSEWHERE if number is None else f"stopped by {signal.Signals(number).name}"
        super().__init__(signal.SIGTERM, f"{stopped} after step {step}, with a checkpoint to go on from")


class Asked:
    """Whether this rank was asked to end, and by which signal."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.at_s = 0.0

    def __bool__(self) -> bool:
        return self.number is not None


@contextmanager
def asked_to_end(tell: Callable[[], None]) -> Iterator[Asked]:
    """Notes the first SIGTERM or SIGUSR1 of the block, and calls `tell`, instead of what they do otherwise.

    Repeats within `SAME_S` are the same request; a later signal does what it did before the block. Signals that nobody
    handles, as in the workers of a claim, stay so.
    """
    asked = Asked()
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
        before = {number: handler for number, handler in before.items() if callable(handler)}

    def note(number: int, frame: FrameType | None) -> None:
        if not asked:
            asked.number, asked.at_s = number, time.monotonic()
            tell()
        elif time.monotonic() - asked.at_s > SAME_S:
            before[number](number, frame)

    for number in before:
        signal.signal(number, note)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
