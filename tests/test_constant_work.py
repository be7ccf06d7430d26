"""What the probes do in Python grows with the number of layers and no faster, and what is always on does not grow.

Counted are the calls of functions, of Python and of C, that a step makes: no clock, so that no machine is too slow.
"""

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench_probes import CELLS
from tests.bench_probes_loops import Loop, MonitorLoop, TrainerLoop

DEPTHS = (4, 6, 8)


def calls_of(step: Callable[[], object]) -> int:
    """Returns how many functions a step calls in this thread."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # what it calls comes at any time
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def counted(kind: type[Loop], folder: Path) -> list[dict[str, int]]:
    """Returns the calls of each kind of step, at each depth."""
    found = []
    for depth in DEPTHS:
        cell = replace(CELLS["smoke"], blocks=depth, d=16)  # so small that no tensor is taken in pieces
        loop = kind(cell.config(), folder / str(depth))
        for step in [*loop.steps] * 2:
            loop.ready(step)
            loop.steps[step]()
        calls = {}
        for step in loop.steps:
            loop.ready(step)
            calls[step] = calls_of(loop.steps[step])
        found.append(calls)
        loop.close()
    return found


@pytest.mark.parametrize("kind", [TrainerLoop, MonitorLoop])
def test_work_in_python_is_constant_per_layer(kind: type[Loop], tmp_path: Path) -> None:
    """Always on, the trainer asks nothing of any layer; the hook of a block asks whether the step is measured."""
    found = counted(kind, tmp_path)
    assert found[0]["bare"] < found[1]["bare"] < found[2]["bare"]
    measured = np.diff([calls["measured"] - calls["always on"] for calls in found])
    assert 0 < measured[0] == measured[1]
    always = np.diff([calls["always on"] - calls["bare"] for calls in found])
    assert always[0] == always[1]
    assert (always[0] == 0) == (kind is TrainerLoop)
