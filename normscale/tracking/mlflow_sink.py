"""The sink: replays the spools of runs and the manifests of claims into MLflow, in a process of its own.

Syncing twice is harmless, a sync that was cut short is completed by the next, and a store that is not there costs
nothing but a line in the report. Importing this module is cheap; mlflow is imported when a sync begins.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from normscale.arguments import to_stderr
from normscale.errors import StoreError
from normscale.tracking import mlflow_layout as layout
from normscale.tracking.address import resolve
from normscale.tracking.files import locked
from normscale.tracking.manifest import read_manifest
from normscale.tracking.mlflow_claim import replay_claim, replay_family, send_view
from normscale.tracking.mlflow_requests import Gone, Store, SyncReport
from normscale.tracking.mlflow_run import cached_record, draw_run, replay_run, run_tags
from normscale.tracking.mlflow_store import ensure_store, one_line, unreachable
from normscale.tracking.reader import at, is_written
from normscale.tracking.sink_process import finish_sink, links, parent_gone, start_sink
from normscale.tracking.spool import SPOOL

__all__ = [
    "SyncReport",
    "ensure_store",
    "finish_sink",
    "follow",
    "links",
    "start_sink",
    "sync",
]

_LOCK_WAIT_S = 300.0
PAUSES = 20
"""How much longer than a sync the pause after it is at least: a claim of 240 runs takes 2 s to look through."""


def sync(runs: Path, uri: str, only: list[str] | None = None, *, live: bool = False) -> SyncReport:
    """Replays all runs and claims of a folder (or the runs named in `only`) and returns what happened; never raises.

    Args:
        runs: The folder of all runs.
        uri: The tracking store.
        only: Ids of the runs to replay; a claim is replayed if it holds one of them.
        live: Whether runs are still being made: a claim without a verdict is then shown as running.
    """
    began = time.monotonic()
    report = SyncReport(uri)
    runs = Path(runs)
    try:
        report.uri = uri = resolve(uri)
        if not runs.is_dir():
            report.failures.append(f"{runs}: is not a folder of runs; train something first")
        elif (problem := unreachable(uri)) is not None:
            report.failures.append(problem)
        else:
            with locked(runs / ".sink.lock", _LOCK_WAIT_S):
                _replay(Store(ensure_store(uri), uri, report), runs, only, live)
    except (Gone, StoreError, TimeoutError) as error:
        report.failures.append(str(error))
    except Exception as error:  # the last guard: a sink never takes anything down with it
        report.failures.append(unreachable(report.uri) or one_line(error))
    report.seconds = time.monotonic() - began
    return report


def follow(runs: Path, uri: str, seconds: float, stop_when: Callable[[], bool]) -> SyncReport:
    """Syncs every `seconds` until `stop_when` says so, then once more; returns the report of that last sync.

    Syncs that take long come less often, so that training loses little to them: see `PAUSES`.
    """
    while not stop_when():
        began = time.monotonic()
        if Path(runs).is_dir():
            _say(sync(runs, uri, live=True))
        ended = time.monotonic()
        due = ended + max(seconds, PAUSES * (ended - began))
        while time.monotonic() < due and not stop_when():
            time.sleep(0.1)
    return sync(runs, uri)


def _replay(store: Store, runs: Path, only: list[str] | None, live: bool) -> None:
    """Replays claims first, then the runs that no claim names."""
    names = sorted(path.parent.name for path in runs.glob(f"*/{SPOOL}"))
    manifests, families = [], []
    for path in sorted((runs / "claims").glob("*.json")):
        try:
            if not path.name.startswith("."):
                manifests.append(read_manifest(path))
        except StoreError as error:
            store.report.failures.append(str(error))
    for manifest in manifests:
        if only is None or set(only) & set(manifest.runs):
            store.report.claims += 1
            families.append(manifest.family)
            store.guard(f"claim {manifest.key}", partial(replay_claim, store, runs, manifest, live))
    for family in dict.fromkeys(families):
        store.guard(f"claims of {family}", partial(replay_family, store, store.experiment(family)))
    claimed = {run for manifest in manifests for run in manifest.runs}
    if not claimed.issuperset(names):
        store.guard("view of all runs", partial(send_view, store, None))
    for name in names:
        if name not in claimed and (only is None or name in only):
            store.guard(f"run {name}", partial(_replay_lone, store, runs / name))
    if only is not None and (missing := [name for name in only if name not in names]):
        store.report.failures.append(f"{runs / missing[0]}: holds no {SPOOL}; is this the name of a run?")


def _replay_lone(store: Store, run_dir: Path) -> None:
    """Replays a run of no claim, nested under the MLflow run that was active where it was started, if any."""
    written = is_written(run_dir)  # asked first: of a process that is gone, all that it wrote is then read
    record = cached_record(run_dir)
    outer = record.start.get("outer_run")
    if (experiment := store.experiment_of(outer)) is None:  # the run is then shown on its own
        experiment, outer = store.experiment(None), None
    alive = record.end is None and written
    colour = layout.colour_alone(str(at(record, "config", "model", "scheme") or layout.model_class(record)))
    tags = run_tags(record, layout.outcome(record, None, alive), colour, None, outer)
    name = at(record, "config", "name") or record.start.get("name")
    title = record.run_id if name in (None, "run") else f"{name} {record.run_id}"
    there = replay_run(store, record, experiment, title, tags, None, alive)
    draw_run(store, record, "", there, alive)


def _say(report: SyncReport) -> None:
    """Says what a sync did; a log on a full disk goes without."""
    with suppress(OSError):
        print(time.strftime("%H:%M:%S"), report, flush=True)
        for failure in report.failures[1:10]:
            print("         also:", failure, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Runs the sink from a command line; returns 0 when everything is stored, 1 when not, 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m normscale.tracking.mlflow_sink", description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="the folder of all runs")
    parser.add_argument("--uri", required=True, help="sqlite:///<file> or http://<host>:<port>")
    parser.add_argument("--only", nargs="*", help="ids of runs to replay")
    parser.add_argument("--follow", type=float, metavar="SECONDS", help="sync again and again")
    parser.add_argument(
        "--until-idle", action="store_true", help="with --follow: end when the starting process is done"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process of a step, as a word to the ranks
    try:
        uri = resolve(options.uri)
        if options.follow is None:
            report = sync(options.runs, uri, options.only)
        else:
            stop = parent_gone() if options.until_idle else (lambda: False)
            report = follow(options.runs, uri, options.follow, stop)
    except StoreError as error:
        to_stderr(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    _say(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
