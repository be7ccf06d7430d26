"""The files a run or a claim carries in MLflow: record, config, profiles, events, pictures, tables."""

import csv
import io
import json
import math
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from normscale.tracking import pictures
from normscale.tracking.manifest import Manifest
from normscale.tracking.mlflow_pages import event_page
from normscale.tracking.reader import RunRecord
from normscale.tracking.text import render

if TYPE_CHECKING:
    from mlflow import MlflowClient

Spans = dict[str, pictures.Limits]
HEATS = {"grad_norm": "3-grad/heat", "stream_rms": "4-resid/heat"}
LABELS = {"grad_norm": "gradient norm", "stream_rms": "stream RMS"}
PROFILE_EVERY = 2000  # steps between the pictures of one run's gradient profile
_MAX_EVENTS = 20


def bad_events(record: RunRecord) -> list[dict[str, Any]]:
    """Returns the events about values that were not finite; for a run that stopped on one there is at least one."""
    found = [event for event in record.events if re.search(r"\bnan\b|non.?finite", str(event.get("event")), re.I)]
    if not found and record.end is not None and record.end.get("outcome") == "nan":
        summary = record.summary
        layer = {"layer": summary["bad_layer"]} if "bad_layer" in summary else {}
        found = [{"kind": "event", "event": "nan", "t": record.end["t"], "step": summary.get("bad_step", 0), **layer}]
    return found


def event_folder(event: Mapping[str, Any]) -> str:
    """Returns the artifact folder of an event."""
    name = re.sub(r"[^a-zA-Z0-9]+", "-", str(event.get("event"))).strip("-").lower()
    return f"events/step-{int(event.get('step', 0)):06d}-{name}"


def upload_run(client: "MlflowClient", run: str, record: RunRecord) -> None:
    """Writes the files of an ended run; writing them again replaces them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "record.txt").write_text(render(record), encoding="utf-8")
        if record.profiles:
            (folder / "profiles").mkdir()
            arrays: dict[str, Any] = {"rows": np.array(record.start.get("rows") or [], dtype=np.str_)}
            for key, one in record.profiles.items():
                arrays |= {key: one.data.T, f"{key}_steps": np.array(one.steps)}  # layers x steps
            np.savez_compressed(folder / "profiles" / "profiles.npz", **arrays)
        bad = bad_events(record)
        for event in [*bad, *(event for event in record.events if event not in bad)][:_MAX_EVENTS]:
            place = folder / event_folder(event)
            place.mkdir(parents=True, exist_ok=True)
            (place / "report.md").write_text(event_page(record, event), encoding="utf-8")
            (place / "event.json").write_text(json.dumps(event, indent=1), encoding="utf-8")
            if event in bad and (picture := _event_picture(record, event)) is not None:
                from PIL import Image

                Image.fromarray(picture).save(place / "profile.png")
        client.log_artifacts(run, str(folder))
    _upload_config(client, run, record)


def spans(records: Sequence[RunRecord]) -> Spans:
    """Returns the colour range of each pictured profile, one for all runs, so that their pictures compare."""
    return {
        name: pictures.limits([record.profiles[name].data for record in records if name in record.profiles])
        for name in HEATS
    }


def upload_pictures(client: "MlflowClient", run: str, record: RunRecord, ranges: Spans) -> int:
    """Writes the stepped images of an ended run that are not there yet; returns how many."""
    wanted: list[tuple[str, int, Any]] = []
    for name, key in HEATS.items():
        if name in record.profiles:
            one = record.profiles[name]
            wanted.append(
                (key, 0, lambda one=one, name=name: pictures.heat(one.steps, one.data, LABELS[name], ranges[name]))
            )
    if "grad_norm" in record.profiles:
        one = record.profiles["grad_norm"]
        for place, index in profile_steps(one.steps, one.data).items():
            wanted.append(("3-grad/profile", place, lambda index=index: _profile(record, index, ranges)))
    for event in bad_events(record)[:1]:
        wanted.append(("2-health/event", 0, lambda event=event: _event_picture(record, event, ranges)))
    there = {Path(item.path).name for item in client.list_artifacts(run, "images")}
    done = 0
    for key, step, draw in wanted:
        prefix = f"{key.replace('/', '~')}+step+{step}+"
        if any(name.startswith(prefix) for name in there) or (picture := draw()) is None:
            continue
        stamp = int(record.end["t"]) if record.end else None
        client.log_image(run, picture, key=key, step=step, timestamp=stamp, synchronous=True)
        done += 1
    return done


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


def _profile(record: RunRecord, index: int, ranges: Spans, bad_row: int | None = None) -> pictures.Picture:
    one = record.profiles["grad_norm"]
    return pictures.profile(one.data[index], LABELS["grad_norm"], ranges["grad_norm"], one.steps[index], bad_row)


def _event_picture(record: RunRecord, event: Mapping[str, Any], ranges: Spans | None = None) -> pictures.Picture | None:
    """Returns the gradient over depth at an event, or at the newest step before it, with the bad layer marked."""
    if "grad_norm" not in record.profiles:
        return None
    steps = record.profiles["grad_norm"].steps
    index = max((index for index, step in enumerate(steps) if step <= event.get("step", 0)), default=0)
    layer = event.get("layer", record.summary.get("bad_layer"))
    bad_row = int(layer) if isinstance(layer, int | float) and math.isfinite(layer) and layer >= 0 else None
    return _profile(record, index, ranges or spans([record]), bad_row)
