"""The spool: an append-only file of JSON lines beside each run. reader.py reads it, record.py says what it holds.

A line is one `write` to a descriptor opened for appending, so a killed process loses at most the line it was writing.
Numbers that are not finite are the strings "NaN", "+Inf" and "-Inf" (the file is strict JSON) and come back as floats.
"""

import base64
import errno
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from normscale.arguments import to_stderr
from normscale.errors import StoreError
from normscale.tracking.files import try_lock
from normscale.tracking.record import PROFILES, QUANTITIES, USER, Outcome

SPOOL = "spool.jsonl"
NON_FINITE = {"NaN": math.nan, "+Inf": math.inf, "-Inf": -math.inf}


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
        self._untold = 0  # lost since the last record that could be written
        self._reason, self._at = "", 0
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
            ValueError: a key is neither a registered quantity nor one of another loop's ("user/...").
        """
        if unknown := sorted(key for key in set(values) - set(QUANTITIES) if not key.startswith(USER)):
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

    def ledger(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes attempted steps that follow one another, in columns; numbers have seven digits here."""
        first, last = int(rows[0]["step"]), int(rows[-1]["step"])
        columns = {name: [_short(row[name]) for row in rows] for name in rows[0] if name not in ("step", "reason")}
        columns = {name: column for name, column in columns.items() if any(value is not None for value in column)}
        not_applied = {str(row["step"]): row["reason"] for row in rows if row["reason"] is not None}
        self._write({"kind": "ledger", "step": last, "first": first, "columns": columns, "not_applied": not_applied})

    def sync(self) -> None:
        """Waits until the records would outlive a loss of power, so that what is kept beside them cannot be ahead."""
        if self._file is not None:
            with suppress(OSError):  # a disk that cannot is said when a record is lost
                os.fsync(self._file)

    def end(self, outcome: Outcome, exit_code: int, summary: Mapping[str, float | int | str]) -> None:
        """Writes the end record and notes in `gone` if it is not where a reader would find it."""
        lost = {"lost": self.lost} if self.lost else {}
        try:
            self._tell_lost()
            self._append({"kind": "end", "outcome": outcome, "exit_code": exit_code, "summary": dict(summary), **lost})
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
            self._tell_lost()
            self._append(record)
        except OSError as error:
            self.lost += 1
            self._untold += 1
            self._reason = error.strerror or str(error)
            self._at = int(record.get("step", 0))
            if not self._warned:
                self._warned = True
                to_stderr(f"{self.path}: a record was lost ({error.strerror}); training goes on, free some space")

    def _tell_lost(self) -> None:
        """Notes in the records, once they can be written again, how many are missing."""
        if self._untold:
            told = {"kind": "event", "step": self._at, "event": "records_lost", "lost": self._untold}
            self._append({**told, "reason": self._reason})
            self._untold = 0

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


def _lock(path: Path) -> int | None:
    """Tries for a moment: a reader that asks whether the run is alive touches the lock for microseconds."""
    for _ in range(10):
        if (descriptor := try_lock(path)) is not None:
            return descriptor
        time.sleep(0.03)
    return None


def _short(value: Any) -> float | None:
    return None if value is None else float(f"{value:.7g}")


def restored(value: Any) -> Any:
    """Returns a value of the file with what `strict` had to write as text put back."""
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def strict(value: Any) -> Any:
    """Returns `value` as strict JSON can hold it; what is no valid Unicode, as in some files' names, is escaped."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    if isinstance(value, Mapping):
        return {strict(str(key)): strict(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes):
        return [strict(item) for item in value]
    if hasattr(value, "tolist") and not isinstance(value, type):  # of numpy or torch
        return strict(value.tolist())
    return strict(str(value))


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
