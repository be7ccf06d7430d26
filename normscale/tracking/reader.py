"""Reads what a spool holds: the records of a run's attempts, put together."""

import base64
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from normscale.errors import StoreError
from normscale.tracking.files import read_regular
from normscale.tracking.record import ABOUT_AN_ATTEMPT, QUANTITIES, Outcome
from normscale.tracking.spool import NON_FINITE, SPOOL, restored

REPEATABLE = frozenset(("loss_train", "loss_val", "grad_norm"))  # a step that is made again gives them again


@dataclass
class Series:
    """One scalar over steps, in step order; values may be NaN or infinite."""

    steps: list[int] = field(default_factory=list)
    applied: list[int] = field(default_factory=list)
    t: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass
class Profile:
    """One array over depth, a row of `data` per step."""

    steps: list[int]
    t: list[int]
    data: NDArray[np.float32]


@dataclass
class RunRecord:
    """Everything the spool of a run says, newest attempt first.

    `ledger` has a row for each attempted step: whether it was applied and why not, its learning rate, norms and scales.
    `attempt` is the newest attempt, `first_attempt` the oldest whose records count (a restart from step 0 drops all
    before it), `torn` the number of unreadable lines, `reached` {attempt: its last step with metrics} of those that
    count and whose start is there, `starts` the times of all starts, of which the first tells two trainings of
    one name apart.
    """

    run_dir: Path
    run_id: str
    start: dict[str, Any]
    series: dict[str, Series]
    profiles: dict[str, Profile]
    events: list[dict[str, Any]]
    end: dict[str, Any] | None
    attempt: int
    first_attempt: int = 1
    torn: int = 0
    reached: dict[int, int] = field(default_factory=dict)
    ledger: list[dict[str, Any]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Returns whether the run came to its own end, on finite numbers or not."""
        return self.end is not None and self.end.get("outcome") in ("finished", "nan")

    @property
    def summary(self) -> dict[str, Any]:
        """Returns the summary of the end record, empty before the end."""
        return dict(self.end.get("summary", {})) if self.end else {}

    def last_finite(self, key: str) -> float | None:
        """Returns the newest finite value of a scalar, or None."""
        values = self.series[key].values if key in self.series else []
        return next((value for value in reversed(values) if math.isfinite(value)), None)


def read_run(run_dir: Path) -> RunRecord:
    """Returns what the spool of a run holds so far; a line that is torn or that no writer of ours made is left out.

    Raises:
        StoreError: there is no spool, or it cannot be read.
    """
    run_dir = Path(run_dir)
    try:
        lines = read_regular(run_dir / SPOOL).split(b"\n")
    except OSError as error:
        message = f"{run_dir / SPOOL}: cannot be read ({error.strerror}); is this the folder of a run?"
        raise StoreError(message) from None
    records, torn = _parse(lines)
    newest = max((record["attempt"] for record in records), default=1)
    starts = {record["attempt"]: record for record in records if record["kind"] == "start"}
    first = max((number for number, start in starts.items() if not start.get("from_step")), default=1)
    kept = [record for record in records if record["attempt"] >= first]
    start = starts.get(newest, starts[max(starts)] if starts else {})
    end = None
    for record in kept:
        if record["kind"] == "end" and record["attempt"] == newest:
            end = record | {"summary": {key: restored(value) for key, value in record.get("summary", {}).items()}}
    begins = {number: begun.get("from_step", 0) for number, begun in starts.items()}
    reached = _reached(kept)
    events = _events(kept, begins, reached)
    run_id = str(start.get("run_id") or run_dir.name)
    series, profiles = _series(kept, begins), _profiles(kept, begins)
    ledger = _ledger(kept)
    times = [record["t"] for record in records if record["kind"] == "start"]
    return RunRecord(run_dir, run_id, start, series, profiles, events, end, newest, first, torn, reached, ledger, times)


def last_whole(profile: Profile) -> int:
    """Returns the place of the newest array that is finite throughout, else of the newest.

    Rows that are NaN at every step have no such number, as sublayers without attention have no attention logit.
    """
    there = profile.data[:, ~np.isnan(profile.data).all(axis=0)]
    whole: list[int] = np.flatnonzero(np.isfinite(there).all(axis=1)).tolist() if there.size else []
    return whole[-1] if whole else len(profile.steps) - 1


def at(record: RunRecord, *keys: str) -> Any:
    """Returns a field of the start record, None where it or a section around it is missing."""
    found: Any = record.start
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def is_foreign(record: RunRecord) -> bool:
    """Returns whether the run is of another loop than ours: nothing is then known of what it trains."""
    return not at(record, "config", "model")


def flat(section: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Returns a nested mapping by dotted keys."""
    found: dict[str, Any] = {}
    for key, item in section.items():
        name = f"{before}{key}"
        found |= flat(item, f"{name}.") if isinstance(item, Mapping) and item else {name: item}
    return found


def row_names(record: RunRecord, profile: str) -> list[str]:
    """Returns what the rows of a profile are of, [] where that is not known.

    The start record names the rows of most (`rows`), and in `profile_rows` those of others, or the field that holds
    them. Profiles over blocks have a row for each group of sublayers.
    """
    count = record.profiles[profile].data.shape[1] if profile in record.profiles else 0
    own = record.start.get("profile_rows")
    named = own.get(profile) if isinstance(own, dict) else None
    named = record.start.get(named) if isinstance(named, str) else named  # a list that several profiles share
    if isinstance(named, list) and len(named) == count:
        return [str(name) for name in named]
    rows: list[str] = record.start.get("rows") or []
    if len(rows) == count:
        return rows
    blocks = list(dict.fromkeys(row.rpartition(".")[0] for row in rows))
    return blocks if len(blocks) == count else []


def next_attempt(run_dir: Path) -> int:
    """Returns the attempt number that a writer opened now should carry: 1 for a new run."""
    return read_run(run_dir).attempt + 1 if (Path(run_dir) / SPOOL).exists() else 1


def is_written(run_dir: Path) -> bool:
    """Returns whether a living process holds the run's folder for writing."""
    try:
        descriptor = os.open(Path(run_dir) / ".lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _parse(lines: Sequence[bytes]) -> tuple[list[dict[str, Any]], int]:
    """Returns the records, with the arrays of profiles unpacked, and the number of lines that are no records."""
    records, torn = [], 0
    for line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            good = _is_record(record)
        except (ValueError, RecursionError):
            good = False
        if good:
            records.append(record)
        else:
            torn += 1
    return records, torn


def _is_record(record: Any) -> bool:
    """Returns whether this is a record whose fields have the types that a writer gives them; unpacks a profile."""
    if not isinstance(record, dict) or not (_whole(record.get("t")) and _whole(record.get("attempt"))):
        return False
    kind = record.get("kind")
    if not isinstance(kind, str):
        return False
    check = _CHECKS.get(kind)
    return check is None or check(record)  # a kind of a later version is passed over


def _is_start(record: dict[str, Any]) -> bool:
    config = record.get("config") or {}
    rows = record.get("rows") or []
    return (
        _sections(record, "config", "identity", "environment", "data", "model", "backend", "precision_seen")
        and _sections(config, "model", "data", "train", "precision", "probes", "tracking")
        and _sections(config.get("train") or {}, "optim", "schedule")
        and _whole(record.get("from_step", 0))
        and all(isinstance(record.get(key), str | None) for key in ("run_id", "outer_run"))
        and isinstance(rows, list)
        and all(isinstance(row, str) for row in rows)
    )


def _is_metrics(record: dict[str, Any]) -> bool:
    values = record.get("values")
    at = _whole(record.get("step")) and _whole(record.get("applied"))
    return at and isinstance(values, dict) and all(map(_number, values.values()))


def _is_profile(record: dict[str, Any]) -> bool:
    data = record.get("data")
    if not (_whole(record.get("step")) and isinstance(record.get("name"), str) and isinstance(data, dict)):
        return False
    if not isinstance(data.get("f32"), str):
        return False
    array = np.frombuffer(base64.b64decode(data["f32"]), dtype="<f4")  # ValueError where it is no array
    record["data"] = array
    return data.get("shape") == [array.size]


def _is_event(record: dict[str, Any]) -> bool:
    return _whole(record.get("step")) and isinstance(record.get("event"), str)


def _is_ledger(record: dict[str, Any]) -> bool:
    columns, why = record.get("columns"), record.get("not_applied")
    if not (_whole(record.get("step")) and _whole(record.get("first")) and isinstance(columns, dict)):
        return False
    steps = record["step"] - record["first"] + 1
    good = all(
        isinstance(column, list) and len(column) == steps and all(x is None or _number(x) for x in column)
        for column in columns.values()
    )
    return good and isinstance(why, dict) and all(isinstance(reason, str) for reason in why.values())


def _is_end(record: dict[str, Any]) -> bool:
    summary = record.get("summary", {})
    if not (record.get("outcome") in get_args(Outcome) and _whole(record.get("exit_code"))):
        return False
    return isinstance(summary, dict) and all(
        _number(value) if _is_numeric(key) else isinstance(value, str | int | float) for key, value in summary.items()
    )


_CHECKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "start": _is_start,
    "metrics": _is_metrics,
    "profile": _is_profile,
    "event": _is_event,
    "ledger": _is_ledger,
    "end": _is_end,
}


def _sections(record: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(record.get(name), dict | None) for name in names)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _number(value: Any) -> bool:
    if isinstance(value, str):
        return value in NON_FINITE
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, float)


def _is_numeric(key: str) -> bool:
    """Returns whether a field of a summary is a number by its name."""
    counts = ("unigram_nats", "steps", "seconds", "train_seconds", "graphs")
    speed = ("flops_per_step", "tflops_s", "peak_flops")
    return key in QUANTITIES or key in counts or key in speed or key.startswith("update@")


def _reached(records: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Returns {attempt: its last step with metrics}, of attempts whose start is there, too."""
    reached = {record["attempt"]: 0 for record in records if record["kind"] == "start"}
    for record in records:
        attempt = record["attempt"]
        if record["kind"] == "metrics" and attempt in reached:
            reached[attempt] = max(reached[attempt], record["step"])
    return reached


def _made_again(step: int, attempt: int, begins: Mapping[int, int], reached: Mapping[int, int]) -> bool:
    """Returns whether an attempt that is newer than `attempt` has made this step."""
    return any(newer > attempt and begins.get(newer, step) < step <= last for newer, last in reached.items())


def _newest(found: Iterable[tuple[str, int, int, Any]], begins: Mapping[int, int]) -> dict[str, dict[int, Any]]:
    """Returns {name: {step: what}}, by step, of (name, step, attempt, what): what each step's newest attempt recorded.

    What an older attempt alone recorded of a step counts until a newer one, which made the step again, has recorded the
    name at a later one. So the last step of a name never falls, and a store that goes by it is sent no step twice.
    """
    newest: dict[str, dict[int, tuple[int, Any]]] = {}
    reached: dict[str, dict[int, int]] = {}
    for name, step, attempt, what in found:
        of_name, last = newest.setdefault(name, {}), reached.setdefault(name, {})
        if step not in of_name or of_name[step][0] <= attempt:
            of_name[step] = (attempt, what)
        last[attempt] = max(step, last.get(attempt, 0))
    return {
        name: {
            step: of_name[step][1]
            for step in sorted(of_name)
            if not _made_again(step, of_name[step][0], begins, reached[name])
        }
        for name, of_name in newest.items()
    }


def _series(records: Sequence[dict[str, Any]], begins: Mapping[int, int]) -> dict[str, Series]:
    found = (
        (key, record["step"], record["attempt"], (record["applied"], record["t"], restored(value)))
        for record in records
        if record["kind"] == "metrics"
        for key, value in record["values"].items()
    )
    series = {}
    for key, of_key in _newest(found, begins).items():
        applied, t, values = (list(column) for column in zip(*of_key.values(), strict=True))
        series[key] = Series(list(of_key), applied, t, values)
    return series


def _events(
    records: Sequence[dict[str, Any]], begins: Mapping[int, int], reached: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Returns the events, each once: what is told of a step that was made again is what its newest attempt told.

    What became of an attempt stays, whichever steps are made again.
    Where a step that was made again gave other numbers, that is an event, too.
    """
    events = [record for record in records if record["kind"] == "event"]
    newest: dict[tuple[str, int], int] = {}
    for event in events:
        key = (event["event"], event["step"])
        newest[key] = max(newest.get(key, 0), event["attempt"])
    events = [
        event
        for event in events
        if event["event"] in ABOUT_AN_ATTEMPT
        or (
            event["attempt"] == newest[event["event"], event["step"]]
            and not _made_again(event["step"], event["attempt"], begins, reached)
        )
    ]
    return events + _differing(records)


def _differing(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns an event for every attempt that did not give the numbers that were there already."""
    first: dict[tuple[str, int], Any] = {}
    events: dict[int, dict[str, Any]] = {}
    for record in records:
        if record["kind"] != "metrics":
            continue
        for key in sorted(REPEATABLE & record["values"].keys()):
            value = record["values"][key]
            before = first.setdefault((key, record["step"]), value)
            if before == value:
                continue
            event = {"kind": "event", "t": record["t"], "attempt": record["attempt"], "step": record["step"]}
            event |= {
                "event": "rerun_differs",
                "key": key,
                "before": restored(before),
                "now": restored(value),
                "values": 0,
            }
            events.setdefault(record["attempt"], event)["values"] += 1
    return list(events.values())


def _ledger(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each attempted step, by step: of a step that was made again, what its newest attempt told."""
    newest: dict[int, tuple[int, dict[str, Any]]] = {}
    for record in records:
        if record["kind"] != "ledger":
            continue
        for i, step in enumerate(range(record["first"], record["step"] + 1)):
            reason = record["not_applied"].get(str(step))
            row = {"step": step, "applied": reason is None, "reason": reason}
            row |= {name: restored(column[i]) for name, column in record["columns"].items()}
            if step not in newest or newest[step][0] <= record["attempt"]:
                newest[step] = (record["attempt"], row)
    return [row for _, (_, row) in sorted(newest.items())]


def _profiles(records: Sequence[dict[str, Any]], begins: Mapping[int, int]) -> dict[str, Profile]:
    found = (
        (record["name"], record["step"], record["attempt"], record) for record in records if record["kind"] == "profile"
    )
    profiles = {}
    for name, of_name in _newest(found, begins).items():
        arrays = [record["data"] for record in of_name.values()]
        rows = max(array.size for array in arrays)
        data = np.full((len(arrays), rows), np.nan, dtype=np.float32)
        for index, array in enumerate(arrays):
            data[index, : array.size] = array
        profiles[name] = Profile(list(of_name), [record["t"] for record in of_name.values()], data)
    return profiles
