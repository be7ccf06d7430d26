"""Runs claims: their missing runs through a pool of workers, then the judge, the figures, the report, the links.

Finished runs are found by what they are, not by where they were asked for, so a claim that was interrupted, or shares
runs with another, continues where it was. Two runners may work on the same folder: a run that one of them holds is
waited for by the other.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from normscale.claims.claim import Cell, Claim, ProfileName, run_config
from normscale.claims.cost import Cost, fitted, from_finished
from normscale.claims.discover import list_claims, select
from normscale.claims.manifest import outcomes_of, record_of, write_manifest
from normscale.claims.progress import RunsProgress, time_left
from normscale.claims.report import Written, writable, write_report
from normscale.claims.workers import Job, Pool, cores
from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.errors import BadInput
from normscale.progress import duration
from normscale.tracking.sink_process import LOG, finish_sink, links, start_sink

TRIAL_LAYERS = (2, 12)
TRIAL_STEPS = 6
SYNC_S = 180.0  # that the last sync into MLflow may take


@dataclass
class Plan:
    """A claim, its cells with the ids of their runs, and the runs it needs."""

    claim: Claim
    cells: list[tuple[Cell, str]] = field(default_factory=list)
    configs: dict[str, RunConfig] = field(default_factory=dict)


def run_claims(
    ids: Sequence[str],
    profile: ProfileName,
    *,
    runs: Path,
    uri: str | None,
    workers: int | None = None,
    reports: Path = Path("reports"),
) -> int:
    """Runs, judges and reports claims (`core`: all core claims); returns 0 when every run has a result, else 1.

    What the results say does not change the code: a refuted claim is a success. The report also shows the other
    claims of the checkout, from what is stored of them.

    Raises:
        BadInput: a claim, a folder or the tracking address cannot be used; no run was started.
        KeyboardInterrupt: it was interrupted; finished runs are kept.
    """
    listed = list_claims()
    claims = select(list(ids), listed)
    runs, reports = runs.absolute(), reports.absolute()
    if workers is not None and workers < 1:
        raise BadInput(f"--workers: {workers} cannot train anything; give 1 or more")
    configs = [
        (claim, [(cell, run_config(claim, cell, str(runs), uri)) for cell in claim.cells(profile)]) for claim in claims
    ]
    reports = reports / "smoke" if profile == "smoke" else reports  # reports/latest keeps its verdicts
    writable(reports)
    print(f"{', '.join(claim.id for claim in claims)}: profile {profile}", flush=True)
    with _devices(profile), _sigterm():
        with _Sink(runs, uri) as sink:
            plans, jobs = _train(configs, profile, runs, workers)
            written = write_report(runs, listed, {claim.id: profile for claim in claims}, reports)
            for plan in plans:
                _note(plan, profile, runs, written)
        lost = [job for job in jobs if job.outcome != "done"]
        print(f"\n{written}")
        for line in sink.links(claims, profile):
            print(line)
    for job in lost:
        print(f"normscale: no result: {job.name}: {job.note}", file=sys.stderr)
    return 1 if lost else 0


def planned(ids: Sequence[str], profile: ProfileName) -> list[str]:
    """Returns a line for each run that `run_claims` would start or find done: its claim, name and what sets it apart.

    Raises:
        BadInput: there is no such claim.
    """
    lines = []
    for claim in select(list(ids), list_claims()):
        for cell in claim.cells(profile):
            config = run_config(claim, cell, "runs", None)
            optim = config.train.optim
            setting = f"scheme={config.model.scheme} M={config.model.M} {optim.name} lr={optim.lr:g}"
            lines.append(f"{claim.id}: {cell.name}: {setting} steps={config.train.steps} seed={config.seed}")
    return [*lines, f"{len(lines)} runs in profile {profile}; nothing was started"]


def _train(
    configs: Sequence[tuple[Claim, list[tuple[Cell, RunConfig]]]], profile: ProfileName, runs: Path, workers: int | None
) -> tuple[list[Plan], list[Job]]:
    """Brings every run of the claims to its end, as far as it has one."""
    # One GPU is shared by few processes: each holds its own context.
    size = min(workers or (cores() if profile != "gpu" else 1), sum(len(own) for _, own in configs))
    with Pool(size) as pool:  # the workers import torch while this process finds the runs
        plans = [_plan(claim, own) for claim, own in configs]
        jobs, done = _jobs(plans, runs)
        for plan in plans:
            _note(plan, profile, runs)
        if jobs:
            cost = from_finished(runs) or _trial(pool, jobs)
            for job in jobs:
                job.cost = cost.of(job.config)
            left = duration(time_left(jobs, pool.size))
            print(f"{len(jobs)} runs to do, {done} done already; about {left} on {pool.size} workers", flush=True)
            _drive(pool, jobs, plans, profile, runs)
        else:
            print(f"all {done} runs are done already", flush=True)
    return plans, jobs


def _plan(claim: Claim, configs: list[tuple[Cell, RunConfig]]) -> Plan:
    import torch

    from normscale.train.identity import run_id_of

    torch.set_num_threads(1)  # as the workers do: it is part of what a run is

    plan = Plan(claim)
    for cell, config in configs:
        run_id = run_id_of(config)
        plan.cells.append((cell, run_id))
        plan.configs[run_id] = config
    return plan


def _jobs(plans: Sequence[Plan], runs: Path) -> tuple[list[Job], int]:
    """Returns the runs that have no end yet, each once, and the number of those that have."""
    jobs: dict[str, Job] = {}
    done = set()
    for plan in plans:
        names = {run_id: cell.name for cell, run_id in plan.cells}
        for run_id, config in plan.configs.items():
            record = record_of(runs, run_id)
            if record is not None and record.finished:
                done.add(run_id)
            else:
                jobs.setdefault(run_id, Job(run_id, names[run_id], config))
    return list(jobs.values()), len(done)


def _trial(pool: Pool, jobs: Sequence[Job]) -> Cost:
    """Returns the cost of this machine, from a few steps at two depths in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="normscale-trial-") as folder:
        trials = []
        for layers in TRIAL_LAYERS:
            settings: dict[str, object] = {
                "model.M": layers,
                "model.N": 0,
                "train.steps": TRIAL_STEPS,
                "train.eval_batches": 1,
            }
            settings |= {"train.schedule.warmup_steps": 0, "train.eval_every": 0, "probes.update": {}}
            config = revise(jobs[0].config, {**settings, "tracking.runs": folder, "tracking.uri": None})
            trials.append(Job("", f"trial {layers}", config))
        pool.run(trials)
    return fitted([(trial.config.model.M, trial.step_s) for trial in trials if trial.step_s]) or Cost()


def _drive(pool: Pool, jobs: Sequence[Job], plans: Sequence[Plan], profile: ProfileName, runs: Path) -> None:
    progress = RunsProgress(jobs, pool.size)

    def tell(job: Job | None) -> None:
        progress(pool.running, job)
        for plan in plans:
            if job is not None and job.run_id in plan.configs:
                _note(plan, profile, runs)

    try:
        pool.run(jobs, tell)
    finally:
        progress.end()


def _note(plan: Plan, profile: ProfileName, runs: Path, written: Written | None = None) -> None:
    """Writes the manifest with what is known by now; with the verdict once the report is written."""
    if written is None:
        write_manifest(runs, plan.claim, profile, plan.cells, {})
        return
    reported = next(reported for reported in written.claims if reported.claim.id == plan.claim.id)
    outcomes = outcomes_of(plan.claim, reported.results, plan.cells)
    figures = [reported.figure] if reported.figure else []
    write_manifest(runs, plan.claim, profile, plan.cells, outcomes, reported.judgement, figures, written.page)


class _Sink:
    """The process that shows the records in MLflow while they are written; without it only the window is missing."""

    def __init__(self, runs: Path, uri: str | None) -> None:
        self.runs, self.uri = runs, uri
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "_Sink":
        if self.uri is not None:
            self.process = start_sink(self.runs, self.uri)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.process is None:
            return
        if kind is not None:  # interrupted: the next start, or `normscale sync`, brings MLflow up to date
            self.process.terminate()
            self.process.wait()
        elif finish_sink(self.process, SYNC_S) != 0:
            print(f"normscale: MLflow is not up to date (see {self.runs / LOG}); run normscale sync", file=sys.stderr)

    def links(self, claims: Sequence[Claim], profile: ProfileName) -> list[str]:
        """Returns the lines that lead to the claims in the MLflow UI."""
        if self.uri is None:
            return []
        found = [line for claim in claims for line in links(self.runs, self.uri, claim.id, profile)]
        return ["", *found, "`make ui` (or `normscale ui`) opens these"] if found else []


@contextmanager
def _devices(profile: ProfileName) -> Iterator[None]:
    """Hides GPUs from all profiles but gpu, in this process and in its workers."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if profile != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


@contextmanager
def _sigterm() -> Iterator[None]:
    """Turns SIGTERM into KeyboardInterrupt, so that workers end with this process."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
