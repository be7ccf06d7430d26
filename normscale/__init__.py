"""normscale: how deep a Transformer can go before training breaks, and why."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normscale.monitor import Monitor as Monitor
    from normscale.monitor import StepReport as StepReport

__version__ = "0.1.0"

_LATE = ("Monitor", "StepReport")


def __getattr__(name: str) -> Any:
    """Returns what lies in `normscale.monitor`, imported when it is asked for, since torch is slow."""
    if name in _LATE:
        return getattr(importlib.import_module("normscale.monitor"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATE])
