"""The newest runs as a table: what `normscale show` says without a name."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normscale.config.sources import plain
from normscale.errors import StoreError
from normscale.progress import duration
from normscale.tracking.draw import Look
from normscale.tracking.find import names_in, newest_first, written
from normscale.tracking.mlflow_layout import outcome
from normscale.tracking.reader import at, is_written, read_run
from normscale.tracking.record import too_few
from normscale.tracking.spool import strict
from normscale.tracking.text import number

NEWEST = 15  # runs that are listed
HEAD = ("run", "name", "scheme", "depth", "steps", "outcome", "gap", "written")


def listing(runs: Path, look: Look) -> list[str]:
    """Returns a line for each of the newest runs in a folder."""
    names = newest_first(names_in(runs), runs)
    if not names:
        return [f"there are no runs in {runs} yet"]
    rows: list[Sequence[str]] = [HEAD, *map(_cells, (_row(runs / name) for name in names[:NEWEST]))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [
        look.fit("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        for row in rows
    ]
    more = len(names) - NEWEST
    return [look.paint(lines[0], "faint"), *lines[1:], *([f"and {more} older ones in {runs}"] if more > 0 else [])]


def as_json(runs: Path) -> list[dict[str, Any]]:
    """Returns the same of all runs of a folder, as strict JSON can hold it."""
    found: list[dict[str, Any]] = strict([_row(runs / name) for name in newest_first(names_in(runs), runs)])
    return found


def _row(folder: Path) -> dict[str, Any]:
    """Returns what is known of a run by the names of the columns."""
    row: dict[str, Any] = {"run": folder.name, "written": round(time.time() - written(folder))}
    try:
        record = read_run(folder)
    except StoreError:
        return row | {"outcome": "unreadable"}
    model = at(record, "config", "model") or {}
    label = at(record, "config", "name")
    reached = max((series.steps[-1] for series in record.series.values() if series.steps), default=None)
    return row | {
        "name": None if label == "run" else label,
        "scheme": model.get("scheme"),
        "depth": " ".join(f"{side}={model[side]}" for side in ("N", "M") if model.get(side)) or None,
        "steps": record.summary.get("steps", reached),
        "outcome": outcome(record, None, record.end is None and is_written(folder)),
        "gap": record.summary.get("gap"),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    cells = []
    for key in HEAD:
        value = row.get(key)
        if key == "written":
            cells.append(f"{duration(row[key])} ago")
        elif isinstance(value, int | float):
            cells.append(number(value, 3) if key == "gap" else number(value))
        else:
            value = "too few steps" if key == "outcome" and too_few(value, row.get("steps")) else value
            cells.append("-" if value is None else plain(str(value), 40 if key == "run" else 20))
    return cells
