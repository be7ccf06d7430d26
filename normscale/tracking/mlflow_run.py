"""The replay of one run into MLflow: parameters, values, texts, files, status, pictures."""

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscale.tracking import mlflow_artifacts as artifacts
from normscale.tracking import mlflow_layout as layout
from normscale.tracking import mlflow_pages as pages
from normscale.tracking import sink_state
from normscale.tracking.event_report import is_bad
from normscale.tracking.manifest import Manifest
from normscale.tracking.mlflow_requests import Store
from normscale.tracking.mlflow_view import ALONE
from normscale.tracking.reader import RunRecord, at, read_run
from normscale.tracking.spool import SPOOL

if TYPE_CHECKING:
    from mlflow.entities import Run

LAYOUT = 6  # raise when the layout changes: every run is then looked at again


def replay_run(
    store: Store, record: RunRecord, experiment: str, name: str, tags: Mapping[str, str], depth: int | None, alive: bool
) -> str:
    """Replays one run under one claim or none; returns the id of its MLflow run.

    Its files are those of one that is over, by an end of its own or since nobody writes it any more. Of a run that goes
    on there are the reports of its bad events.
    """
    what, claim = f"run {record.run_id}", tags.get("normscale.key", "")
    store.report.runs += 1
    spool = read_at(record)
    mark = stamp(LAYOUT, spool, sorted(tags.items()), name, depth, alive)
    remembered = sink_state.load(record.run_dir / sink_state.RUN_FILE, store.uri)
    run = store.find(experiment, claim, record.run_id, tags.get("normscale.began", ""))
    run = run or _untagged(store.find(experiment, claim, record.run_id), record, remembered.get(claim, {}))
    if run is not None and int(run.data.tags.get("normscale.attempt", "1")) < record.first_attempt:
        store.client.delete_run(run.info.run_id)  # its values are of a training that was begun anew
        store.forget(experiment)
        run = None
    known = remembered.get(claim, {}) if run is not None else {}
    if run is not None and known.get("run") != run.info.run_id:
        known = {}
    if run is not None and known.get("mark") == mark:
        return str(run.info.run_id)
    fresh = run is None
    if run is None:
        run = store.create(experiment, name, record.start.get("t"), tags)
    run_id = str(run.info.run_id)
    well = store.send_texts(what, run, {}, layout.params(record, depth))
    points = layout.points(record, store.bounds.key_chars, alive)
    last: dict[str, int] = dict(known.get("last") or {})
    for point in points:
        last[point.key] = max(point.step, last.get(point.key, -1))
    if not fresh:
        points = _unsent(store, run, record, points, known)
    well &= store.send_points(what, run_id, points)
    well &= _send_data(store, run, record)
    over = is_over(record, alive)
    folders = artifacts.event_folders(record)
    if not over:
        folders = {place: folder for place, folder in folders.items() if is_bad(record.events[place])}
    page = pages.run_page(record, tags["outcome"], experiment, run_id, folders, claim or ALONE, over)
    well &= store.send_texts(what, run, {**tags, "mlflow.note.content": page, "mlflow.runName": name}, {})
    files = stamp(LAYOUT, spool)
    if over and known.get("files") != files:
        well &= store.attempt(f"{what}, files", lambda: artifacts.upload_run(store.client, run_id, record))
    reports = set(known.get("reports", ()))
    if not over and not reports.issuperset(folders.values()):
        new = [place for place, folder in folders.items() if folder not in reports]
        upload = partial(artifacts.upload_reports, store.client, run_id, record, new)
        well &= store.attempt(f"{what}, reports of events", upload)
    well &= store.set_status(f"{what}, status", run, layout.status(record, alive), last_time(record))
    if well:
        remembered[claim] = known | {"run": run_id, "mark": mark, "last": last}
        remembered[claim] |= {"files": files} if over else {"reports": sorted(reports.union(folders.values()))}
        bad = next((folder for place, folder in folders.items() if place < 0 or is_bad(record.events[place])), None)
        remembered[claim] |= {"experiment": experiment, "event": f"{bad}/report.html" if bad else None}
    else:
        remembered.pop(claim, None)
    sink_state.save(record.run_dir / sink_state.RUN_FILE, store.uri, remembered)
    return run_id


def _untagged(run: "Run | None", record: RunRecord, known: Mapping[str, Any]) -> "Run | None":
    """Returns a run whose tags do not say when it began, as those of older stores, if it is this training's."""
    own = run is not None and (run.info.start_time in record.starts or run.info.run_id == known.get("run"))
    return run if own else None


def run_tags(
    record: RunRecord, word: str, colour: str, manifest: Manifest | None, parent: str | None
) -> dict[str, str]:
    """Returns the tags of a run, without its description."""
    environment = record.start.get("environment") or {}
    scheme = str(at(record, "config", "model", "scheme") or "") or layout.model_class(record)
    tags = {
        "normscale.kind": "run",
        "normscale.run": record.run_id,
        "normscale.attempt": str(record.first_attempt),
        "normscale.began": str(record.starts[0]) if record.starts else "",
        "normscale.version": str(environment.get("normscale") or ""),
        "normscale.git": str(environment.get("git") or ""),
        "mlflow.source.name": "normscale",
        "mlflow.runColor": colour,
        "outcome": word,
        "arm": scheme,
    }
    if parent:
        tags["mlflow.parentRunId"] = parent
    if manifest is not None:
        cell = manifest.cell_of(record.run_id)
        tags |= {"normscale.kind": "arm", "normscale.claim": manifest.id, "normscale.profile": manifest.profile}
        tags |= {"normscale.key": manifest.key, "arm": cell.arm, "cell": layout.cell_tag(cell), "role": cell.role}
    return {key: value for key, value in tags.items() if value}


def is_over(record: RunRecord, alive: bool) -> bool:
    """Returns whether nothing follows in a run's records, as far as is known: a killed run has no end of its own."""
    return record.end is not None or not alive


def draw_run(
    store: Store, record: RunRecord, claim: str, run_id: str, alive: bool, ranges: artifacts.Spans | None = None
) -> None:
    """Writes the missing pictures of a run: all of one that is over, those that are due of one that goes on.

    Those of its end are drawn anew when a further attempt has come to another end.
    """
    over = is_over(record, alive)
    if over and is_drawn(store, record, claim, run_id):
        return
    path = record.run_dir / sink_state.RUN_FILE
    known = sink_state.load(path, store.uri).get(claim, {})
    drawn = set(known.get("drawn", [])) if known.get("run") == run_id else set()
    wanted = artifacts.wanted_pictures(record, alive)
    missing = {place: draw for place, draw in wanted.items() if place[1] == 0 or _place(*place) not in drawn}
    if not missing and not over:
        return

    def upload() -> None:
        given = ranges if ranges is not None else artifacts.spans([record])
        store.report.pictures += artifacts.upload_pictures(store.client, run_id, missing, given, last_time(record))
        if over:
            artifacts.upload_figure(store.client, run_id, record)

    if store.attempt(f"run {record.run_id}, pictures", upload):
        remembered = sink_state.load(path, store.uri)
        if claim in remembered:
            remembered[claim]["drawn"] = sorted(drawn | {_place(*place) for place in wanted})
            if over:
                remembered[claim]["pictures"] = _ending(record)
            sink_state.save(path, store.uri, remembered)


def _ending(record: RunRecord) -> int | str:
    """Returns what tells one end of a run from another: the attempt, and of one without an end how far it came."""
    return record.attempt if record.end is not None else f"{record.attempt}, lost after {last_time(record)}"


def _place(key: str, step: int) -> str:
    return f"{key}@{step}"


def is_stored(run_dir: Path, uri: str) -> bool:
    """Returns whether a store is known to hold all that a run has recorded by now, with its pictures."""
    files = stamp(LAYOUT, file_stamp(run_dir / SPOOL))
    known = sink_state.load(run_dir / sink_state.RUN_FILE, uri)
    return any(entry.get("files") == files and "pictures" in entry for entry in known.values())


def is_drawn(store: Store, record: RunRecord, claim: str, run_id: str) -> bool:
    """Returns whether the pictures of a run are known to be there."""
    known = sink_state.load(record.run_dir / sink_state.RUN_FILE, store.uri).get(claim, {})
    return bool(known.get("run") == run_id and known.get("pictures") == _ending(record))


def _send_data(store: Store, run: "Run", record: RunRecord) -> bool:
    """Names the data set of a run, with its digest."""
    data: dict[str, Any] = record.start.get("data") or {}
    if not data.get("name") or (run.inputs is not None and run.inputs.dataset_inputs):
        return True
    from mlflow.entities import Dataset, DatasetInput, InputTag

    digest = str(data.get("digest") or "unknown")[: store.bounds.digest_chars]
    source = json.dumps({key: value for key, value in data.items() if isinstance(value, str | int | float)})
    one = Dataset(str(data["name"]), digest, source_type="code", source=source)
    inputs = [DatasetInput(one, [InputTag("mlflow.data.context", "training")])]
    return store.attempt(
        f"{record.run_id}, data set", lambda: store.client.log_inputs(run.info.run_id, datasets=inputs)
    )


def _unsent(
    store: Store, run: "Run", record: RunRecord, points: list[layout.Point], known: Mapping[str, Any]
) -> list[layout.Point]:
    """Returns the points that may be missing: each (key, step) is sent once, whatever attempt it comes from."""
    if known.get("last") is not None:
        last: dict[str, int] = known["last"]
        return [point for point in points if point.step > last.get(point.key, -1)]
    if record.attempt == record.first_attempt:
        return points  # their times are the same as before, so that sending them again changes nothing
    there = {
        key: {metric.step for metric in store.client.get_metric_history(run.info.run_id, key)}
        for key in run.data.metrics
    }
    return [point for point in points if point.step not in there.get(point.key, ())]


_CACHE: dict[Path, tuple[object, RunRecord]] = {}


def cached_record(run_dir: Path) -> RunRecord:
    """Returns the record of a run, read again only when its spool has changed."""
    mark = file_stamp(run_dir / SPOOL)
    if run_dir not in _CACHE or _CACHE[run_dir][0] != mark:
        _CACHE[run_dir] = (mark, read_run(run_dir))
    return _CACHE[run_dir][1]


def read_at(record: RunRecord) -> object:
    """Returns the stamp that the spool of a cached record had when it was read: it may have grown since."""
    return _CACHE[record.run_dir][0]


def last_time(record: RunRecord) -> int | None:
    """Returns the time of the last thing recorded."""
    if record.end is not None:
        return int(record.end["t"])
    return max((series.t[-1] for series in record.series.values() if series.t), default=record.start.get("t"))


def stamp(*parts: object) -> str:
    """Returns a short digest of whatever a replay depends on."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def file_stamp(path: Path | None) -> tuple[int, int] | None:
    """Returns (size, time of change) of a file, None when it is not there."""
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return None
    return (found.st_size, found.st_mtime_ns) if found else None
