"""Everything a run recorded as Parquet files. Scalars and arrays are in long form: one value a row.

`metrics.parquet`, the scalars:

- `step`     attempted step, 0 before training
- `applied`  optimizer steps applied by then
- `time`     when it was recorded, UTC
- `name`     the quantity, as in tracking/record.py ("user/..." for those of another loop)
- `value`    float64; NaN, +Inf and -Inf are themselves here, unlike in MLflow's metrics

`profiles.parquet`, the arrays over depth:

- `step`     attempted step
- `profile`  the name of the array, as in tracking/record.py
- `row`      place in it, from 0
- `name`     what the row is of: a sublayer, a block, a module; "" where that is not known
- `value`    float32, as for the scalars

`ledger.parquet`, a row for each attempted step, where the run kept a ledger:

- `step`, `applied`, and `reason` where it was not applied
- what else was noted of it, float64: learning rate, norms, loss scale

`events.parquet`, what happened once, where anything did:

- `step`, `time`, and `event`, its name, as in tracking/event_report.py
- `attempt`  the start of the run that tells it, from 1
- `says`     the event in a sentence
- `fields`   all else that was noted of it, as JSON (NaN as "NaN"): the culprit of a bad value, what led there

`summary.parquet`, the numbers of the end, of a run that came to one:

- `name`     the quantity, and `outcome`, `exit_code`, `attempt`
- `value`    float64, null where it is a text, which `text` holds

With pandas: `pandas.read_parquet("profiles.parquet").query("profile == 'grad_norm'").pivot(index="row", columns="step",
values="value")`.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from normscale.tracking.event_report import sentence
from normscale.tracking.reader import RunRecord, row_names
from normscale.tracking.spool import strict

if TYPE_CHECKING:
    import pyarrow

GROUP = 1_000_000  # rows that are made at once
EVENT_COLUMNS = ("kind", "step", "t", "event", "attempt")  # fields of an event that are columns, or the same in all


def write_metrics(record: RunRecord, path: Path) -> None:
    """Writes the scalars of a run."""
    import pyarrow as pa
    from pyarrow import parquet

    names = list(record.series)
    series = list(record.series.values())
    columns = {
        "step": pa.array([step for one in series for step in one.steps], pa.int64()),
        "applied": pa.array([applied for one in series for applied in one.applied], pa.int64()),
        "time": pa.array([t for one in series for t in one.t], pa.timestamp("ms", tz="UTC")),
        "name": _repeated(np.repeat(np.arange(len(names)), [len(one.steps) for one in series]), names),
        "value": pa.array([value for one in series for value in one.values], pa.float64()),
    }
    parquet.write_table(pa.table(columns), path, compression="zstd")


def write_profiles(record: RunRecord, path: Path) -> None:
    """Writes the arrays over depth of a run."""
    import pyarrow as pa
    from pyarrow import parquet

    words = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema(
        {"step": pa.int64(), "profile": words, "row": pa.int32(), "name": words, "value": pa.float32()}.items()
    )
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for name, profile in record.profiles.items():
            steps, rows = profile.data.shape
            labels = row_names(record, name) or [""] * rows
            at_once = max(1, GROUP // max(1, rows))
            for begin in range(0, steps if rows else 0, at_once):
                data = profile.data[begin : begin + at_once]
                row = np.tile(np.arange(rows, dtype=np.int32), len(data))
                columns = [
                    pa.array(np.repeat(profile.steps[begin : begin + at_once], rows), pa.int64()),
                    _repeated(np.zeros(data.size, dtype=np.int32), [name]),
                    pa.array(row),
                    _repeated(row, labels),
                    pa.array(data.reshape(-1)),
                ]
                writer.write_table(pa.table(columns, schema=schema))


def write_ledger(record: RunRecord, path: Path) -> None:
    """Writes the step ledger of a run."""
    import pyarrow as pa
    from pyarrow import parquet

    own = {"step": pa.int64(), "applied": pa.bool_(), "reason": pa.string()}
    names = dict.fromkeys([*own, *(name for row in record.ledger for name in row)])
    columns = {name: pa.array([row.get(name) for row in record.ledger], own.get(name, pa.float64())) for name in names}
    parquet.write_table(pa.table(columns), path, compression="zstd")


def write_events(record: RunRecord, path: Path) -> None:
    """Writes the events of a run."""
    import pyarrow as pa
    from pyarrow import parquet

    events, rows = record.events, record.start.get("rows") or []
    rest = [{key: item for key, item in event.items() if key not in EVENT_COLUMNS} for event in events]
    columns = {
        "step": pa.array([event["step"] for event in events], pa.int64()),
        "time": pa.array([event["t"] for event in events], pa.timestamp("ms", tz="UTC")),
        "event": pa.array([event["event"] for event in events], pa.string()),
        "attempt": pa.array([event["attempt"] for event in events], pa.int64()),
        "says": pa.array([sentence(event, rows) for event in events], pa.string()),
        "fields": pa.array([json.dumps(strict(fields)) for fields in rest], pa.string()),
    }
    parquet.write_table(pa.table(columns), path, compression="zstd")


def write_summary(record: RunRecord, path: Path) -> None:
    """Writes the numbers of a run's end."""
    import pyarrow as pa
    from pyarrow import parquet

    end = record.end or {}
    found = {key: end[key] for key in ("outcome", "exit_code", "attempt") if key in end} | record.summary
    columns = {
        "name": pa.array(list(found), pa.string()),
        "value": pa.array([None if isinstance(x, str) else float(x) for x in found.values()], pa.float64()),
        "text": pa.array([x if isinstance(x, str) else None for x in found.values()], pa.string()),
    }
    parquet.write_table(pa.table(columns), path, compression="zstd")


def _repeated(places: Any, words: list[str]) -> "pyarrow.DictionaryArray":
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(pa.array(places, pa.int32()), pa.array(words, pa.string()))
