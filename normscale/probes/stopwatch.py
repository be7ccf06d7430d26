"""Times what a probe does beside the training step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Adds up the seconds of the blocks it times; on a GPU by events, for which nobody waits."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._open: list[tuple[Any, Any]] = []

    @contextmanager
    def timing(self, device: torch.device) -> Iterator[None]:
        """Times the block, whose work is on `device`."""
        if device.type != "cuda":
            begun = time.perf_counter()
            try:
                yield
            finally:
                self.seconds += time.perf_counter() - begun
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        try:
            yield
        finally:
            last.record()
            self._open.append((first, last))

    def settle(self) -> None:
        """Adds what a GPU has finished by now; called after numbers have come to the host, when it has."""
        while self._open and self._open[0][1].query():
            first, last = self._open.pop(0)
            self.seconds += first.elapsed_time(last) / 1000
