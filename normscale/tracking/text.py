"""Numbers and records as a person reads them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from normscale.config.sources import plain
from normscale.tracking.reader import RunRecord, is_foreign
from normscale.tracking.record import QUANTITIES


def number(value: Any, digits: int = 4) -> str:
    """Returns a number with at most `digits` significant digits; NaN, +Inf and -Inf by these names; None as "-"."""
    if value is None or isinstance(value, str):
        return value or "-"
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.{digits}g}"


def unit_of(record: RunRecord, name: str) -> str:
    """Returns the unit of a scalar, "" where that is not known: a loss of another loop need be no cross-entropy."""
    if name not in QUANTITIES or (name == "loss_train" and is_foreign(record)):
        return ""
    return QUANTITIES[name].unit


def named(names: Sequence[str], most: int) -> str:
    """Returns names in a row, those after the first `most` as their count."""
    shown = ", ".join(plain(name, 60) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def nonfinite_points(record: RunRecord) -> list[tuple[int, str, str]]:
    """Returns (step, quantity, "NaN" | "+Inf" | "-Inf") for every recorded scalar that is not finite, by step."""
    found = [
        (step, key, number(value))
        for key, series in record.series.items()
        for step, value in zip(series.steps, series.values, strict=True)
        if not math.isfinite(value)
    ]
    return sorted(found)


def render(record: RunRecord) -> str:
    """Returns the run's record as plain text: how it ended, each scalar's last value, what was not finite."""
    outcome = record.end.get("outcome", "?") if record.end else "not ended"
    lines = [f"run      {record.run_id}", f"outcome  {outcome} (attempt {record.attempt})", ""]
    summary = record.summary
    if summary:
        lines += [f"{key:<18} {number(value)}" for key, value in summary.items()] + [""]
    lines.append(f"{'quantity':<18} {'steps':>6} {'last step':>9} {'last value':>12}  unit")
    for key, series in record.series.items():
        if series.steps:
            last = number(series.values[-1])
            lines.append(f"{key:<18} {len(series.steps):>6} {series.steps[-1]:>9} {last:>12}  {unit_of(record, key)}")
    bad = nonfinite_points(record)
    lines += ["", f"not finite: {len(bad)} values" if bad else "not finite: none"]
    lines += [f"  step {step}: {key} = {value}" for step, key, value in bad[:100]]
    if len(bad) > 100:
        lines.append(f"  and {len(bad) - 100} more")
    if record.events:
        lines += ["", "events:"] + [f"  step {event.get('step')}: {event_line(event)}" for event in record.events[:50]]
    return "\n".join(lines) + "\n"


def event_line(event: Mapping[str, Any]) -> str:
    """Returns an event on one line: its name, then its short fields."""
    fields = [
        f"{key}={number(value) if isinstance(value, int | float) else value}"
        for key, value in event.items()
        if key not in ("kind", "t", "attempt", "step", "event") and isinstance(value, str | int | float)
    ]
    return " ".join([str(event.get("event")), *fields])
