"""The event of a step that was not finite, as every loop records it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from normscale.arguments import to_stderr
from normscale.probes.culprit import Culprit

_T = TypeVar("_T")

RUN_UP = 5  # measured steps that an event shows of the culprit's row, or of the whole model
OF_THE_WHOLE = ("loss_train", "grad_norm", "logz_mean", "logz_max", "stream_first", "stream_last", "stream_max")
"""What an event shows of the whole model, where the culprit lies in no row."""
MOST_FAULTS = 20  # parameters that an event lists
MOST_BUFFERS = 20

NORM_OVERFLOW = "norm overflow: every gradient entry is finite, their squares are not"


def tried(seek: Callable[[], _T]) -> _T | None:
    """Returns what is found; nothing where that fails, since the other ranks wait to hear of it."""
    try:
        return seek()
    except Exception as error:
        to_stderr(f"a non-finite step: {type(error).__name__}: {error}")
        return None


def fault_of(kinds: Sequence[str], *, otherwise: str) -> str:
    """Returns what went wrong in a word: the first kind in the reduced gradients, where they have one."""
    return kinds[0] if kinds else otherwise


def of_the_whole(step: int, values: Mapping[str, float | None]) -> dict[str, float]:
    """Returns what the run-up to a bad value in no block has of a measured step, out of its recorded values."""
    known = {name: value for name in OF_THE_WHOLE if (value := values.get(name)) is not None}
    return {"step": step, **known}


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
    whole: Sequence[Mapping[str, float]] = (),
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
        whole: What `of_the_whole` gives of those steps; it is taken where the culprit lies in no row.
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
    elif layer < 0 and whole:
        said["run_up"] = [dict(one) for one in whole]
        said["run_up_of"] = "the whole model, as what went bad is in no block that is known"
    if refused:
        said["replay_refused"] = refused
    if buffers:
        said["buffers_not_put_back"] = list(buffers[:MOST_BUFFERS])
    return said
