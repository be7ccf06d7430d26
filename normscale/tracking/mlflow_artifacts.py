"""The files a run or a claim carries in MLflow: record, config, profiles, events, pictures, tables."""

import csv
import io
import json
import math
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from normscale.tracking import event_page, pictures
from normscale.tracking.depth_figure import depth_figure
from normscale.tracking.event_report import is_bad, report_of, row_of
from normscale.tracking.manifest import Manifest
from normscale.tracking.parquet import write_events, write_ledger, write_metrics, write_profiles, write_summary
from normscale.tracking.reader import Profile, RunRecord, at, row_names
from normscale.tracking.spool import strict
from normscale.tracking.text import render

if TYPE_CHECKING:
    from mlflow import MlflowClient

Spans = dict[str, pictures.Limits]
HEATS = {
    "grad_norm": "3-grad/heat",
    "stream_grad_norm": "3-grad/heat",
    "stream_grad": "3-grad/heat",
    "stream_rms": "4-resid/heat",
}
"""Profiles that are shown as heat maps; of two with one key, the first that a run has."""

LABELS = {
    "grad_norm": "gradient norm",
    "stream_grad_norm": "stream's gradient",
    "stream_grad": "stream's gradient",
    "stream_rms": "stream RMS",
}
PROFILE_EVERY = 2000  # steps between the pictures of one run's gradient profile
LONG = 2000  # steps from which a run has heat maps on its way, too
QUARTERS = (25, 50, 75)  # percent of a long run at which it has them
_MAX_EVENTS = 20
_TOLD_IN_A_LINE = ("loss_scale", "spike")  # events with no more to tell than their sentence
_MAX_PICTURED_EVENTS = 3

Wanted = dict[tuple[str, int], Callable[[Spans], "pictures.Picture | None"]]
"""Pictures by (key, step), each drawn with given colour ranges."""


def bad_events(record: RunRecord) -> list[dict[str, Any]]:
    """Returns the events of steps that were not finite; for a run that stopped on one there is at least one."""
    found = [event for event in record.events if is_bad(event)]
    summary = record.summary
    known = summary.get("bad_step", 0) >= 0  # -1: no step was bad
    if not found and record.end is not None and record.end.get("outcome") == "nan" and known:
        layer = {"layer": summary["bad_layer"]} if "bad_layer" in summary else {}
        found = [{"kind": "event", "event": "nan", "t": record.end["t"], "step": summary.get("bad_step", 0), **layer}]
    return found


def reported(record: RunRecord) -> dict[int, dict[str, Any]]:
    """Returns the events that have a report of their own, by their place in the record; the bad ones come first.

    A stop that left no event has the place -1.
    """
    bad = bad_events(record)
    places = {id(event): index for index, event in enumerate(record.events)}
    others = [event for event in record.events if not is_bad(event) and event.get("event") not in _TOLD_IN_A_LINE]
    return {places.get(id(event), -1): event for event in [*bad, *others][:_MAX_EVENTS]}


def event_folders(record: RunRecord) -> dict[int, str]:
    """Returns the artifact folder of each event that has a report, by its place in the record.

    Of several of one name at one step, as after two starts from one checkpoint, the later ones are numbered.
    """
    count: Counter[str] = Counter()
    found: dict[int, str] = {}
    for place, event in sorted(reported(record).items()):
        folder = event_folder(event)
        count[folder] += 1
        found[place] = folder if count[folder] == 1 else f"{folder}-{count[folder]}"
    return found


def event_folder(event: Mapping[str, Any]) -> str:
    """Returns the artifact folder of an event."""
    name = re.sub(r"[^a-zA-Z0-9]+", "-", str(event.get("event"))).strip("-").lower()
    return f"events/step-{int(event.get('step', 0)):06d}-{name}"


def upload_run(client: "MlflowClient", run: str, record: RunRecord) -> None:
    """Writes the files of a run that is over; writing them again replaces them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "record.txt").write_text(render(record), encoding="utf-8")
        (folder / "data").mkdir()
        write_metrics(record, folder / "data" / "metrics.parquet")
        if record.profiles:
            write_profiles(record, folder / "data" / "profiles.parquet")
        if record.ledger:
            write_ledger(record, folder / "data" / "ledger.parquet")
        if record.events:
            write_events(record, folder / "data" / "events.parquet")
        if record.end is not None:
            write_summary(record, folder / "data" / "summary.parquet")
        _write_reports(record, folder)
        client.log_artifacts(run, str(folder))
    _upload_config(client, run, record)


def upload_reports(client: "MlflowClient", run: str, record: RunRecord, places: Sequence[int]) -> None:
    """Writes the reports of the events at these places of the record of a run that goes on."""
    with tempfile.TemporaryDirectory() as name:
        _write_reports(record, Path(name), places)
        client.log_artifacts(run, name)


def _write_reports(record: RunRecord, folder: Path, places: Sequence[int] | None = None) -> None:
    """Writes the reports of the events at these places, or of all that have one."""
    pictured, folders = bad_events(record)[:_MAX_PICTURED_EVENTS], event_folders(record)
    for place, event in reported(record).items():
        if places is None or place in places:
            write_report(record, event, folder / folders[place], event in pictured)


def write_report(record: RunRecord, event: Mapping[str, Any], place: Path, pictured: bool = True) -> None:
    """Writes the report of one event into a folder: as text, as a page with its picture, and its fields."""
    from PIL import Image

    place.mkdir(parents=True, exist_ok=True)
    report, png, says = report_of(record, event), None, ""
    if pictured and is_bad(event) and (picture := event_picture(record, event)) is not None:
        drawn = io.BytesIO()
        Image.fromarray(picture).save(drawn, "PNG")
        png, says = drawn.getvalue(), event_picture_says(record, event)
        (place / "profile.png").write_bytes(png)
    (place / "report.md").write_text(event_page.markdown(report, record.run_id), encoding="utf-8")
    (place / "report.html").write_text(event_page.html(report, record.run_id, png, says), encoding="utf-8")
    (place / "event.json").write_text(json.dumps(strict(event), indent=1), encoding="utf-8")


def heats(record: RunRecord) -> dict[str, str]:
    """Returns {profile: key} of the heat maps of a run."""
    found: dict[str, str] = {}
    for name, key in HEATS.items():
        if name in record.profiles and record.profiles[name].data.size and key not in found.values():
            found[name] = key
    return found


def spans(records: Sequence[RunRecord]) -> Spans:
    """Returns the colour range of each pictured profile, one for all runs, so that their pictures compare."""
    return {
        name: pictures.limits([record.profiles[name].data for record in records if name in record.profiles])
        for name in HEATS
    }


def wanted_pictures(record: RunRecord, alive: bool = False) -> Wanted:
    """Returns the stepped images that a run should have by now; one that is `alive` may not be over.

    Once it is over: a heat map of each main profile and the profile of an event at step 0, where the UI's slider
    opens, and the gradient over depth every PROFILE_EVERY steps. A long run also has heat maps of what there was at a
    quarter, at half and at three quarters of it (where nobody knows how long it will be, as in another loop, after
    1000, 2000, 4000, ... steps), and at its first bad events.
    """
    wanted: Wanted = {}
    over = record.end is not None or not alive
    for name, key in heats(record).items():
        steps = record.profiles[name].steps
        if over:
            wanted[key, 0] = partial(_heat, record, name, len(steps))
        for step in _on_the_way(record):
            until = sum(each <= step for each in steps)
            if until and steps[-1] >= step:
                wanted[key, step] = partial(_heat, record, name, until)
    gradient = next((name for name, key in heats(record).items() if key == "3-grad/heat"), None)
    if over and gradient is not None:
        one = record.profiles[gradient]
        for step, index in profile_steps(one.steps, one.data).items():
            wanted["3-grad/profile", step] = partial(_profile, record, gradient, index)
    if over:
        for event in bad_events(record)[:1]:
            wanted["2-health/event", 0] = partial(event_picture, record, event)
    return wanted


def _on_the_way(record: RunRecord) -> list[int]:
    """Returns the steps of a long run at which its heat maps are drawn before its end."""
    asked = at(record, "config", "train", "steps")
    reached = max((series.steps[-1] for series in record.series.values() if series.steps), default=0)
    steps = asked if isinstance(asked, int) else reached
    if steps < LONG:
        return []
    due = [steps * percent // 100 for percent in QUARTERS]
    if not isinstance(asked, int):
        due = [LONG // 2 * 2**times for times in range((reached * 2 // LONG).bit_length())]
    events = [int(event.get("step", 0)) for event in bad_events(record)[:_MAX_PICTURED_EVENTS]]
    return sorted({step for step in [*due, *events] if 0 < step <= reached})


def upload_pictures(
    client: "MlflowClient", run: str, wanted: Mapping[tuple[str, int], Any], ranges: Spans, stamp: int | None
) -> int:
    """Writes those stepped images that are not there yet; returns how many.

    An image at step 0 is of the end at the time `stamp`, and one of an earlier end does not count: the UI shows the
    newest at a step.
    """
    there = {Path(item.path).name for item in client.list_artifacts(run, "images")}
    done = 0
    for (key, step), draw in wanted.items():
        prefix = f"{key.replace('/', '~')}+step+{step}+" + (f"timestamp+{stamp}+" if step == 0 else "")
        if any(name.startswith(prefix) for name in there) or (picture := draw(ranges)) is None:
            continue
        client.log_image(run, picture, key=key, step=step, timestamp=stamp, synchronous=True)
        done += 1
    return done


def upload_figure(client: "MlflowClient", run: str, record: RunRecord) -> None:
    """Writes the figure of every profile over depth of a run in place of an older one."""
    from PIL import Image

    if not any(one.data.size for one in record.profiles.values()):
        return
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "depth.png"
        Image.fromarray(depth_figure(record)).save(path)
        client.log_artifact(run, str(path), "figures")


def profile_steps(steps: Sequence[int], data: Any) -> dict[int, int]:
    """Returns {step to show it at: index}: the first profile (at 0, where the UI's slider opens), then one every
    PROFILE_EVERY steps, and the last that is finite throughout."""
    chosen, due = {0: 0}, PROFILE_EVERY
    for index, step in enumerate(steps):
        if step >= due:
            chosen[step], due = index, (step // PROFILE_EVERY + 1) * PROFILE_EVERY
    finite = [index for index in range(len(steps)) if np.isfinite(data[index]).all()]
    if finite and finite[-1] not in chosen.values():
        chosen[steps[finite[-1]]] = finite[-1]
    return chosen


def upload_claim(
    client: "MlflowClient", run: str, manifest: Manifest, rows: list[dict[str, Any]], runs: Path, base: RunRecord | None
) -> None:
    """Writes the files of a claim: verdict, figures, report, its cells as a table twice (UI, CSV), `base`'s config."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("tables", "data", "figures"):
            (folder / part).mkdir()
        if manifest.verdict is not None:
            text = json.dumps({"id": manifest.id, "profile": manifest.profile} | manifest.verdict, indent=1)
            (folder / "verdict.json").write_text(text, encoding="utf-8")
        columns = list(rows[0]) if rows else []
        table = {"columns": columns, "data": [[_json_number(row[column]) for column in columns] for row in rows]}
        (folder / "tables" / "cells.json").write_text(json.dumps(table), encoding="utf-8")
        sheet = io.StringIO()
        writer = csv.DictWriter(sheet, columns)
        writer.writeheader()
        writer.writerows(rows)
        (folder / "data" / "cells.csv").write_text(sheet.getvalue(), encoding="utf-8")
        for figure in manifest.figures:
            if (source := locate(figure, runs)) is not None:
                shutil.copy(source, folder / "figures" / source.name)
        if manifest.report and (source := locate(manifest.report, runs)) is not None:
            shutil.copy(source, folder / "report.html")
        client.log_artifacts(run, str(folder))
    if base is not None:
        _upload_config(client, run, base)


def locate(path: str, runs: Path) -> Path | None:
    """Returns a figure's or report's file: as written, or from the folder of all runs; None when it is not there."""
    return next((place for place in (Path(path), runs / path) if place.is_file()), None)


def _upload_config(client: "MlflowClient", run: str, record: RunRecord) -> None:
    if (record.run_dir / "config.yaml").is_file():
        client.log_artifact(run, str(record.run_dir / "config.yaml"))
    elif record.start.get("config"):
        client.log_dict(run, record.start["config"], "config.yaml")


def _json_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _heat(record: RunRecord, name: str, until: int, ranges: Spans) -> pictures.Picture:
    one, rows = record.profiles[name], row_names(record, name)
    bad = [(int(event["step"]), row_of(event, rows)) for event in bad_events(record)[:_MAX_PICTURED_EVENTS]]
    last = math.inf if until == len(one.steps) else one.steps[until - 1]  # on the way, what came later is not shown
    marks = [(step, row) for step, row in bad if 0 <= step <= last]
    return pictures.heat(one.steps[:until], one.data[:until], LABELS[name], ranges[name], marks)


def _profile(record: RunRecord, name: str, index: int, ranges: Spans) -> pictures.Picture:
    one = record.profiles[name]
    return pictures.profile(one.data[index], LABELS[name], ranges[name], one.steps[index])


def event_picture(record: RunRecord, event: Mapping[str, Any], _: Spans | None = None) -> pictures.Picture | None:
    """Returns a profile over depth at an event, or at the newest step before it, with the bad layer marked.

    Its range is its own: it is compared with nothing.

    It is the stream's where the value went bad on the way forward, else the gradient's.
    """
    if (name := _profile_of(record, event)) is None:
        return None
    one = record.profiles[name]
    index = _index_of(one, event)
    rows = row_names(record, name)
    row = _bad_row(record, event, rows)
    earlier = [at for at in range(index) if np.isfinite(one.data[at]).all()]
    before = (one.steps[earlier[-1]], one.data[earlier[-1]]) if earlier else None
    before = None if np.isfinite(one.data[index]).all() else before
    bad = rows[row] if row is not None and row < len(rows) else ""
    return pictures.profile(one.data[index], LABELS[name], None, one.steps[index], row, before, bad)


def event_picture_says(record: RunRecord, event: Mapping[str, Any]) -> str:
    """Returns the line below the picture of an event, which names only what is in it."""
    name = _profile_of(record, event)
    if name is None:
        return ""
    one = record.profiles[name]
    index = _index_of(one, event)
    step, rows = one.steps[index], row_names(record, name)
    when = "of this step" if step == event.get("step") else f"of step {step}, the last that was measured before"
    said = [f"{LABELS[name]} over depth {when}"]
    if _bad_row(record, event, rows) is not None:
        said.append("the line marks where the value went bad")
    if not np.isfinite(one.data[index]).all():
        said.append("triangles are not finite")
        if any(np.isfinite(one.data[at]).all() for at in range(index)):
            said.append("grey is the newest finite step")
    return "; ".join(said)


def _bad_row(record: RunRecord, event: Mapping[str, Any], rows: Sequence[str]) -> int | None:
    """Returns the row of a profile that an event is about, or that the run ended on where the event does not say."""
    row = row_of(event, rows)
    if row is None and "layer" not in event and "culprit" not in event:
        return row_of({"layer": record.summary.get("bad_layer")}, rows)
    return row


def _profile_of(record: RunRecord, event: Mapping[str, Any]) -> str | None:
    culprit = event.get("culprit")
    phase = culprit.get("phase") if isinstance(culprit, Mapping) else None
    shown = list(heats(record))
    if phase in ("forward", "loss", "data", "parameter") and "stream_rms" in shown:
        return "stream_rms"
    return shown[0] if shown else None


def _index_of(profile: Profile, event: Mapping[str, Any]) -> int:
    return max((index for index, step in enumerate(profile.steps) if step <= event.get("step", 0)), default=0)
