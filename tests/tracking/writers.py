"""Eight machines at once: each has its own folder of runs, and its sink in a process of its own."""

import multiprocessing
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from normscale.tracking import sink_state
from normscale.tracking.mlflow_sink import sync
from tests.tracking.made import make_run

WRITERS, STEPS = 8, 40
Row = tuple[str, str, int]
"""Name of a run, metric key, step."""


def make_folders(place: Path) -> list[Path]:
    """Writes one run for each machine."""
    folders = [place / f"node{number}" for number in range(WRITERS)]
    for number, folder in enumerate(folders):
        make_run(folder, depth=2 + number, seed=number, steps=STEPS, every=20, run_id=f"run-of-node{number}")
    return folders


def forget(folders: Iterable[Path]) -> None:
    """Takes from the sinks what they know, so that they send everything again."""
    for folder in folders:
        (folder / f"run-of-{folder.name}" / sink_state.RUN_FILE).unlink()


def write_at_once(folders: list[Path], uri: str, work: Callable[[Path, str], Any] = sync) -> tuple[list[Any], float]:
    """Returns the reports of sinks that all begin at the same moment, and how long they took."""
    from mlflow import MlflowClient  # imported before the fork, so that all eight race

    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(WRITERS), context.Queue()

    def write(folder: Path) -> None:
        barrier.wait(60)
        results.put(work(folder, uri))

    assert MlflowClient
    processes = [context.Process(target=write, args=(folder,)) for folder in folders]
    for process in processes:
        process.start()
    began = time.monotonic()
    reports = [results.get(timeout=100) for _ in processes]
    seconds = time.monotonic() - began
    for process in processes:
        process.join()
    return reports, seconds


def check_rows(rows: list[Row], reports: list[Any]) -> None:
    """Asserts that each point of each run is there once, and nothing else."""
    sent = sum(report.points for report in reports)
    assert len(rows) == len(set(rows)) == sent, f"{len(rows)} rows, {len(set(rows))} different ones, {sent} sent"
    losses = [(run, step) for run, key, step in rows if key == "1-loss/train"]
    wanted = [(f"run-of-node{number}", step) for number in range(WRITERS) for step in range(STEPS + 1)]
    assert sorted(losses) == sorted(wanted), "a loss is missing or there twice"


ROWS = """select tags.value, metrics.key, metrics.step from metrics join tags using (run_uuid)
 where tags.key = 'normscale.run'"""
