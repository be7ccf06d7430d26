"""The spool: an append-only file of JSON lines beside each run, and its reader. What the records hold: record.py.

A line is one `write` to a descriptor opened for appending, so a killed process loses at most the line it was writing.
Numbers that are not finite are the strings "NaN", "+Inf" and "-Inf" (the file is strict JSON) and come back as floats.
"""

import base64
import errno
import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from normscale.errors import StoreError
from normscale.tracking.files import read_regular, try_lock
from normscale.tracking.record import PROFILES, QUANTITIES, Outcome

SPOOL = "spool.jsonl"
REPEATABLE = frozenset(("loss_train", "loss_val", "grad_norm"))  # a step that is made again gives them again
_NON_FINITE = {"NaN": math.nan, "+Inf": math.inf, "-Inf": -math.inf}


class SpoolWriter:
    """Appends the records of one attempt of a run; holds the run's folder for itself until closed.

    An error while training (a disk that fills up) never raises: it is said once on stderr, the records lost are
    counted in `lost`, and the next record tries again. Whether the end was recorded, `gone` says.

    Raises:
        StoreError: the folder cannot be written, or another process writes this run.
    """

    def __init__(self, run_dir: Path, attempt: int):
        self.run_dir = Path(run_dir)
        self.path = self.run_dir / SPOOL
        self.attempt = attempt
        self.lost = 0
        self.last = 0  # the newest step whose metrics were written
        self.gone: str | None = None  # why the end record is not in the run's folder, once `end` was called
        self._warned = False
        self._lock: int | None = None
        self._file: int | None = None
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.run_dir / ".lock")
            if self._lock is not None:
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                self._torn = _ends_torn(self.path)
        except OSError as error:
            self.close()
            raise _unwritable(self.run_dir, error) from None
        if self._lock is None:
            raise StoreError(
                f"{self.run_dir}: another process is writing this run; wait for it or stop it, then start again"
            )

    def start(self, **fields: Any) -> None:
        """Writes the start record of this attempt.

        Raises:
            StoreError: it cannot be written (a full disk): better known now than after training.
        """
        try:
            self._append({"kind": "start", **fields})
        except OSError as error:
            raise _unwritable(self.run_dir, error) from None

    def metrics(self, step: int, applied: int, values: Mapping[str, float]) -> None:
        """Writes the scalars of one attempted step.

        Raises:
            ValueError: a key is not a registered quantity.
        """
        if unknown := sorted(set(values) - set(QUANTITIES)):
            raise ValueError(f"{unknown[0]!r} is not a registered quantity; register it in tracking/record.py")
        numbers = {key: float(value) for key, value in values.items()}
        self._write({"kind": "metrics", "step": int(step), "applied": int(applied), "values": numbers})

    def profile(self, step: int, name: str, data: ArrayLike) -> None:
        """Writes one array over depth.

        Raises:
            ValueError: the name is not a registered profile, or the array has not one dimension.
        """
        if name not in PROFILES:
            raise ValueError(f"{name!r} is not a registered profile; register it in tracking/record.py")
        array = np.ascontiguousarray(data, dtype="<f4")
        if np.ndim(data) != 1:
            raise ValueError(f"profile {name!r} has shape {np.shape(data)}; one value per row is wanted")
        packed = {"shape": list(array.shape), "f32": base64.b64encode(array.tobytes()).decode("ascii")}
        self._write({"kind": "profile", "step": int(step), "name": name, "data": packed})

    def event(self, step: int, event: str, **fields: Any) -> None:
        """Writes something that happened once; fields named kind, t or attempt, as a record's own, get a trailing _."""
        free = {key + "_" if key in ("kind", "t", "attempt") else key: value for key, value in fields.items()}
        self._write({"kind": "event", "step": int(step), "event": event, **free})

    def sync(self) -> None:
        """Waits until the records would outlive a loss of power, so that what is kept beside them cannot be ahead."""
        if self._file is not None:
            with suppress(OSError):  # a disk that cannot is said when a record is lost
                os.fsync(self._file)

    def end(self, outcome: Outcome, exit_code: int, summary: Mapping[str, float | int | str]) -> None:
        """Writes the end record and notes in `gone` if it is not where a reader would find it."""
        try:
            self._append({"kind": "end", "outcome": outcome, "exit_code": exit_code, "summary": dict(summary)})
            if self._file is not None and os.fstat(self._file).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "it was deleted during the run")
        except OSError as error:
            self.lost += 1
            self.gone = error.strerror or str(error)

    def close(self) -> None:
        """Releases the run; safe to call twice."""
        for descriptor in (self._file, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, record: dict[str, Any]) -> None:
        try:
            self._append(record)
        except OSError as error:
            self.lost += 1
            if not self._warned:
                self._warned = True
                message = f"normscale: {self.path}: a record was lost ({error.strerror}); training goes on"
                print(f"{message}, free some space", file=sys.stderr, flush=True)

    def _append(self, record: dict[str, Any]) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is closed")
        stamped = {"kind": record["kind"], "t": time.time_ns() // 1_000_000, "attempt": self.attempt, **record}
        text = json.dumps(strict(stamped), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
        line = (b"\n" if self._torn else b"") + text.encode("utf-8") + b"\n"
        written = 0
        try:
            written = os.write(self._file, line)
            if written < len(line):  # the disk is nearly full; the rest would fail or come out of order
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._torn = self._torn or written > 0
            raise
        self._torn = False
        if record["kind"] == "metrics":
            self.last = record["step"]


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

    `attempt` is the newest attempt, `first_attempt` the oldest whose records count (a restart from step 0 drops all
    before it), `torn` the number of unreadable lines, `reached` {attempt: its last step with metrics} of those that
    count and whose start is there.
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
            end = record | {"summary": {key: _float(value) for key, value in record.get("summary", {}).items()}}
    events = _events(kept)
    run_id = str(start.get("run_id") or run_dir.name)
    series, profiles = _series(kept), _profiles(kept)
    reached = _reached(kept)
    return RunRecord(run_dir, run_id, start, series, profiles, events, end, newest, first, torn, reached)


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


def _lock(path: Path) -> int | None:
    """Tries for a moment: a reader that asks whether the run is alive touches the lock for microseconds."""
    for _ in range(10):
        if (descriptor := try_lock(path)) is not None:
            return descriptor
        time.sleep(0.03)
    return None


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
    "end": _is_end,
}


def _sections(record: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(record.get(name), dict | None) for name in names)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _number(value: Any) -> bool:
    if isinstance(value, str):
        return value in _NON_FINITE
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


def _series(records: Sequence[dict[str, Any]]) -> dict[str, Series]:
    points: dict[str, dict[int, tuple[int, int, int, float]]] = {}
    for record in records:
        if record["kind"] != "metrics":
            continue
        step, attempt = record["step"], record["attempt"]
        for key, value in record["values"].items():
            of_key = points.setdefault(key, {})
            if step not in of_key or of_key[step][0] <= attempt:
                of_key[step] = (attempt, record["applied"], record["t"], _float(value))
    series = {}
    for key, of_key in points.items():
        rows = sorted(of_key.items())
        applied, t, values = ([row[1][column] for row in rows] for column in (1, 2, 3))
        series[key] = Series([row[0] for row in rows], applied, t, values)  # type: ignore[arg-type]
    return series


def _events(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the events, each once: what is told of a step that was made again is what its newest attempt told.

    Where a step that was made again gave other numbers, that is an event, too.
    """
    events = [record for record in records if record["kind"] == "event"]
    newest: dict[tuple[str, int], int] = {}
    for event in events:
        key = (event["event"], event["step"])
        newest[key] = max(newest.get(key, 0), event["attempt"])
    events = [event for event in events if event["attempt"] == newest[event["event"], event["step"]]]
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
            event |= {"event": "rerun_differs", "key": key, "before": _float(before), "now": _float(value), "values": 0}
            events.setdefault(record["attempt"], event)["values"] += 1
    return list(events.values())


def _profiles(records: Sequence[dict[str, Any]]) -> dict[str, Profile]:
    newest: dict[str, dict[int, dict[str, Any]]] = {}
    for record in records:
        if record["kind"] == "profile":
            of_name = newest.setdefault(record["name"], {})
            if record["step"] not in of_name or of_name[record["step"]]["attempt"] <= record["attempt"]:
                of_name[record["step"]] = record
    profiles = {}
    for name, of_name in newest.items():
        steps = sorted(of_name)
        arrays = [of_name[step]["data"] for step in steps]
        rows = max(array.size for array in arrays)
        data = np.full((len(steps), rows), np.nan, dtype=np.float32)
        for index, array in enumerate(arrays):
            data[index, : array.size] = array
        profiles[name] = Profile(steps, [of_name[step]["t"] for step in steps], data)
    return profiles


def _float(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def strict(value: Any) -> Any:
    """Returns `value` as strict JSON can hold it."""
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return strict(value.tolist())
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes):
        return [strict(item) for item in value]
    if hasattr(value, "item"):  # a scalar of numpy or torch
        return strict(value.item())
    return str(value)


def _ends_torn(path: Path) -> bool:
    """Returns whether the last line lacks its newline."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _unwritable(run_dir: Path, error: OSError) -> StoreError:
    reason = error.strerror or error
    return StoreError(
        f"tracking.runs: cannot write {run_dir} ({reason}); choose another folder: tracking.runs=<folder>"
    )
