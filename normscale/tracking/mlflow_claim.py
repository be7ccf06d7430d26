"""The replay of one claim into MLflow: a parent with the verdict, a child per run, pictures, views, tables."""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscale.tracking import mlflow_artifacts as artifacts
from normscale.tracking import mlflow_layout as layout
from normscale.tracking import mlflow_pages as pages
from normscale.tracking import mlflow_view as views
from normscale.tracking import sink_state
from normscale.tracking.manifest import Manifest
from normscale.tracking.mlflow_requests import Store
from normscale.tracking.mlflow_run import (
    LAYOUT,
    cached_record,
    draw_run,
    file_stamp,
    is_drawn,
    last_time,
    replay_run,
    run_tags,
    stamp,
)
from normscale.tracking.reader import RunRecord, is_written
from normscale.tracking.spool import SPOOL

if TYPE_CHECKING:
    from mlflow.entities import Run


def replay_claim(store: Store, runs: Path, manifest: Manifest, live: bool) -> None:
    """Brings everything of one claim that is there so far into the store."""
    _Claim(store, runs, manifest).replay(live)


class _Claim:
    def __init__(self, store: Store, runs: Path, manifest: Manifest):
        self.store, self.runs, self.manifest = store, runs, manifest
        self.what = f"claim {manifest.key}"
        self.experiment = store.experiment(manifest.family)
        self.parent = self.find_parent()
        self.id = str(self.parent.info.run_id)
        self.names = layout.child_names(manifest)
        self.colours = layout.colours([cell.arm for cell in manifest.cells])
        self.records: dict[str, RunRecord] = {}
        self.words: dict[str, str] = {}  # the outcome of each run
        self.children: dict[str, tuple[str, str]] = {}  # name and MLflow run of each

    def replay(self, live: bool) -> None:
        """Replays the runs, then what needs them all."""
        for by_cell in (False, True):
            send_view(self.store, self.manifest, by_cell)
        for run in self.manifest.runs:
            if (self.runs / run / SPOOL).is_file():
                self.store.guard(f"run {run}", partial(self.replay_child, run))
        self.draw()
        self.send_front_page()
        self.send_numbers(live)
        self.send_files()

    def find_parent(self) -> "Run":
        """Returns the claim's own run, created if it is not there."""
        manifest, word = self.manifest, pages.verdict_of(self.manifest)
        tags = {
            "normscale.kind": "claim",
            "normscale.claim": manifest.id,
            "normscale.profile": manifest.profile,
            "normscale.key": manifest.key,
            "mlflow.source.name": "normscale",
            "mlflow.note.content": f"**{word.upper()}** - {manifest.says}",
            "verdict": word,
        }
        there = self.store.find(self.experiment, manifest.key, "")
        name = f"{manifest.id} {manifest.profile}"
        return there or self.store.create(self.experiment, name, manifest.t or None, tags)

    def replay_child(self, run: str) -> None:
        """Replays one run."""
        cell = self.manifest.cell_of(run)
        written = is_written(self.runs / run)  # asked first: of a process that is gone, all that it wrote is then read
        record = cached_record(self.runs / run)
        alive = record.end is None and written
        word = layout.outcome(record, cell, alive)
        self.records[run], self.words[run] = record, word
        tags = run_tags(record, word, self.colours[cell.arm], self.manifest, self.id)
        there = replay_run(self.store, record, self.experiment, self.names[run], tags, cell.depth, alive)
        self.children[run] = (self.names[run], there)

    def draw(self) -> None:
        """Draws the pictures once all pictured runs ended, since they share one colour range."""
        wanted = layout.pictured(self.manifest)
        chosen = [run for run in wanted if run in self.children and self.records[run].end is not None]
        if not chosen or (len(chosen) < len(wanted) and self.manifest.verdict is None):
            return
        key = self.manifest.key
        missing = [run for run in chosen if not is_drawn(self.store, self.records[run], key, self.children[run][1])]
        ranges = artifacts.spans([self.records[run] for run in chosen]) if missing else {}
        for run in missing:
            draw_run(self.store, self.records[run], key, self.children[run][1], False, ranges)

    def send_front_page(self) -> None:
        """Writes the description and the tags."""
        manifest, verdict = self.manifest, self.manifest.verdict or {}
        page = pages.claim_page(manifest, self.experiment, self.id, self.records, self.words, self.children)
        tags = {
            "mlflow.note.content": page,
            "verdict": pages.verdict_of(manifest),
            "headline": str(verdict.get("headline") or ""),
            "mlflow.loggedArtifacts": '[{"path": "tables/cells.json", "type": "table"}]',
        }
        for record in list(self.records.values())[:1]:
            environment = record.start.get("environment") or {}
            tags["normscale.version"] = str(environment.get("normscale") or "")
            tags["normscale.git"] = str(environment.get("git") or "")
        self.store.send_texts(self.what, self.parent, {key: value for key, value in tags.items() if value}, {})

    def send_numbers(self, live: bool) -> None:
        """Writes the verdict's numbers, where they are new, and the status."""
        store, verdict = self.store, self.manifest.verdict
        if verdict is None:
            store.set_status(f"{self.what}, status", self.parent, "RUNNING" if live else "KILLED", None)
            return
        failed = sum(word in ("nan", "error") for word in self.words.values())
        numbers: dict[str, Any] = {"cells": len(self.manifest.runs), "failed": failed}
        now = int(time.time() * 1000)
        points = [layout.at_end(key, value, now) for key, value in numbers.items()]
        there = self.parent.data.metrics
        new = [point for point in points if point is not None and there.get(point.key) != point.value]
        store.send_points(self.what, self.id, new)
        end = max((last_time(record) or 0 for record in self.records.values()), default=0) or None
        store.set_status(f"{self.what}, status", self.parent, "FINISHED", end)

    def base(self) -> RunRecord | None:
        """Returns the record whose configuration stands for the claim: the first main run that is there."""
        main = [cell.run for cell in self.manifest.cells if cell.role == "main" and cell.run in self.records]
        return self.records[main[0]] if main else None

    def send_files(self) -> None:
        """Uploads verdict, figures, report and tables when one of them has changed, and remembers the links."""
        store, manifest = self.store, self.manifest
        path = self.runs / sink_state.CLAIMS_FILE
        remembered = sink_state.load(path, store.uri)
        old = remembered.get(manifest.key, {})
        files = [*manifest.figures, *([manifest.report] if manifest.report else [])]
        stamps = [file_stamp(artifacts.locate(file, self.runs)) for file in files]
        mark: str | None = stamp(LAYOUT, replace(manifest, t=0), self.words, self.children, stamps)
        if old.get("run") != self.id or old.get("mark") != mark:
            rows = _table(manifest, self.records, self.words)
            upload = partial(artifacts.upload_claim, store.client, self.id, manifest, rows, self.runs, self.base())
            if not store.attempt(f"{self.what}, files", upload):
                mark = None
        events = [
            [*self.children[run], artifacts.event_folder(bad[0]) + "/report.html"]
            for run, record in self.records.items()
            if run in self.children and (bad := artifacts.bad_events(record))
        ]
        place = {"id": manifest.id, "profile": manifest.profile, "experiment": self.experiment, "run": self.id}
        place |= {"verdict": pages.verdict_of(manifest)}
        remembered[manifest.key] = place | {"events": events, "mark": mark}
        sink_state.save(path, store.uri, remembered)


def send_view(store: Store, manifest: Manifest | None, by_cell: bool = False) -> None:
    """Writes a prepared view of a claim: every run, or one line per arm and depth; of all runs of no claim for None."""
    experiment = store.experiment(manifest.family if manifest else None)
    name, title = views.ALONE, "All runs"
    if manifest is not None:
        name = manifest.key + ("-cells" if by_cell else "")
        title = f"Claim {manifest.id} ({manifest.profile})" + (", one line per cell" if by_cell else "")
    there = store.client.get_experiment(experiment).tags
    key, packed = views.TAG + name, views.pack(views.view(manifest, by_cell=by_cell))
    old = json.loads(there[key]) if key in there else {}
    if old.get("state") != packed:
        now = int(time.time() * 1000)
        times = {"createdAt": old.get("createdAt", now), "updatedAt": now}
        store.set_experiment_tag(experiment, key, json.dumps({"name": title, **times, "state": packed}))


def replay_family(store: Store, experiment_id: str) -> None:
    """Writes the list of an experiment's claims into its description."""
    claims = []
    for run in store.claims(experiment_id):
        tags = run.data.tags
        name = f"{tags.get('normscale.claim')} ({tags.get('normscale.profile')})"
        headline = tags.get("headline", "")
        claims.append((name, tags.get("verdict", "pending"), headline, experiment_id, run.info.run_id))
    text = pages.family_page(claims)[: store.bounds.experiment_tag_chars]
    if claims and store.client.get_experiment(experiment_id).tags.get("mlflow.note.content") != text:
        store.set_experiment_tag(experiment_id, "mlflow.note.content", text)


def _table(manifest: Manifest, records: Mapping[str, RunRecord], words: Mapping[str, str]) -> list[dict[str, Any]]:
    rows = []
    for cell in manifest.cells:
        summary = records[cell.run].summary if cell.run in records else {}
        row: dict[str, Any] = {
            "cell": layout.cell_tag(cell),
            "seed": cell.seed,
            "outcome": words.get(cell.run, "not run"),
        }
        row |= {key: summary.get(key) for key in ("gap", "loss_val", "grad_slope", "grad_min_end", "bad_step", "steps")}
        row |= {"arm": cell.arm, "depth": cell.depth, "lr": cell.lr, "role": cell.role}
        rows.append(row | {"seconds": summary.get("seconds"), "run": cell.run})
    return rows
