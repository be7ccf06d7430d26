"""The event of a step that was not finite, as every loop records it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from normscale.probes.culprit import Culprit

_T = TypeVar("_T")

RUN_UP = 5  # measured steps that an event shows of the culprit's row
MOST_FAULTS = 20  # parameters that an event lists
MOST_BUFFERS = 20

NORM_OVERFLOW = "norm overflow: every gradient entry is finite, their squares are not"


def tried(seek: Callable[[], _T]) -> _T | None:
    """Returns what is found; nothing where that fails, since the other ranks wait to hear of it."""
    try:
        return seek()
    except Exception as error:
        print(f"normscale: a non-finite step: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return None


def fault_of(kinds: Sequence[str], *, otherwise: str) -> str:
    """Returns what went wrong in a word: the first kind in the reduced gradients, where they have one."""
    return kinds[0] if kinds else otherwise


def event_fields(
    *,
    fault: str,
    layer: int,
    parameter: str,
    faults: Sequence[Mapping[str, Any]],
    culprit: Culprit | None,
    run_up: Sequence[Mapping[str, float]],
    refused: str,
    buffers: Sequence[str],
) -> dict[str, Any]:
    """Returns what an event "nonfinite" says of where it went wrong.

    Args:
        fault: In a word.
        layer: The row over depth that it lies in; -1 where it lies in none, or that is not known.
        parameter: The parameter at fault, or the first on the way back whose gradient is; "" where there is none.
        faults: The parameters whose reduced gradients are not finite.
        culprit: The first value that was not finite.
        run_up: The row's values on the last measured steps before, newest last.
        refused: Why nothing was replayed, "" where it was.
        buffers: Those that the step wrote to and that could not be put back.
    """
    said: dict[str, Any] = {
        "fault": fault,
        "layer": layer,
        "parameter": parameter,
        "parameters": [dict(one) for one in faults[:MOST_FAULTS]],
        "parameters_bad": len(faults),
    }
    if culprit is not None:
        said["culprit"] = culprit.fields()
    if run_up:
        said["run_up"] = [dict(one) for one in run_up]
    if refused:
        said["replay_refused"] = refused
    if buffers:
        said["buffers_not_put_back"] = list(buffers[:MOST_BUFFERS])
    return said
