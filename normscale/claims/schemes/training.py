"""Trains what the survey of schemes lacks, what tells most first."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from normscale.claims.claim import Cell, Claim, ProfileName, work_config
from normscale.claims.cost import Cost, from_finished, hours
from normscale.claims.manifest import write_manifest
from normscale.claims.plans import Plan, jobs_of, plans_of
from normscale.claims.progress import RunsProgress, time_left
from normscale.claims.runner import at_a_time, device_of, devices, sigterm
from normscale.claims.schemes.survey import DEPTHS, FOLDER, PRECISIONS, scheme_of, surveys
from normscale.claims.workers import Job, Pool
from normscale.progress import duration
from normscale.schemes import scheme_names

START_UP_S = 10.0  # until the workers have imported torch; empirical

Bring = Callable[[Sequence[Job], int, float], None]
"""Brings jobs to their ends, so many at a time; none begins that would end after a time of `time.monotonic()`."""


def in_workers(jobs: Sequence[Job], workers: int, until: float) -> None:
    """Trains in worker processes, and says how far it is; as `Bring`."""
    with Pool(workers) as pool:
        progress = RunsProgress(jobs, workers)
        try:
            pool.run(jobs, lambda job: progress(pool.running, job), until)
        finally:
            progress.end()


def train(
    schemes: Sequence[str], runs: Path, profile: ProfileName, budget_h: float, bring: Bring = in_workers
) -> list[str]:
    """Brings the survey's runs of these schemes to their ends; returns a line for each that failed.

    No run begins that would end after `budget_h` hours; the same start again goes on.

    Raises:
        StoreError: the folder of runs cannot be written.
        KeyboardInterrupt: it was interrupted; the message says what is kept.
    """
    until = time.monotonic() + 3600 * budget_h
    with devices(profile), sigterm():
        plans = _plans(runs, profile)
        asked = {
            run: (plan.claim, cell) for plan in plans for cell, run in plan.cells if scheme_of(cell.arm) in schemes
        }
        jobs = [job for job in jobs_of(plans, runs / FOLDER)[0] if job.run_id in asked]
        done = len(asked) - len(jobs)
        if not jobs:
            print(f"survey of schemes: all {done} runs are done already", flush=True)
            return []
        workers = min(at_a_time(profile), len(jobs))
        cost = from_finished(runs, device_of(profile)) or (Cost() if device_of(profile) == "cpu" else None)
        for job in jobs:
            job.rank, job.cost = _rank(*asked[job.run_id]), 1.0 if cost is None else cost.of(job.config)
            job.name = job.config.name or job.name  # which says which part of the survey it is of
        print(f"survey of schemes: {len(jobs)} runs to do, {done} done already; {_price(jobs, cost, workers)}")
        print(
            f"none begins that would not end within {budget_h:g} hours; Ctrl-C keeps what is done, and the same command"
            " goes on",
            flush=True,
        )
        try:
            bring(jobs, workers, until)
        except KeyboardInterrupt:
            ended = done + sum(job.outcome == "done" for job in jobs)
            kept = f"{ended} of {len(asked)} runs are finished and kept; the same command goes on with the others"
            raise KeyboardInterrupt(kept) from None
    if late := [job.cost for job in jobs if job.outcome is None]:
        enough = max(late) <= 3600 * budget_h
        mend = "the same command goes on with them" if enough else f"one takes {duration(max(late))}; give more --hours"
        print(f"survey of schemes: the time was up before {len(late)} runs; {mend}", flush=True)
    return [f"{job.name}: {job.note}" for job in jobs if job.outcome not in ("done", None)]


def _plans(runs: Path, profile: ProfileName) -> list[Plan]:
    """Returns the survey of all schemes, so that its manifests, which this writes, know what other starts have left."""
    folder = runs / FOLDER
    configs = [
        (claim, [(cell, work_config(claim, cell, str(folder), None)) for cell in claim.cells(profile)])
        for claim in surveys(scheme_names()).values()
    ]
    plans = plans_of(configs)
    for plan in plans:
        write_manifest(folder, plan.claim, profile, plan.cells, {})
    return plans


def _rank(claim: Claim, cell: Cell) -> int:
    """Returns whose turn it is: the deepest models, which take most of the time, come last.

    Of others first those in fp32, then the rising rates, then those in other precisions.
    """
    precision = PRECISIONS["gpu"].index(claim.arms[cell.arm]["precision.compute"])
    return 10 * (cell.depth == DEPTHS[-1]) + 2 * precision + claim.to_failure


def _price(jobs: Sequence[Job], cost: Cost | None, workers: int) -> str:
    if cost is None:
        return "what they cost on this device is not known: none has finished on it"
    wall = time_left(jobs, workers)
    total = hours(sum(job.cost for job in jobs) if cost.device == "cpu" else wall, cost.device)
    return f"about {duration(wall + START_UP_S)} with {workers} at a time, {total} (estimated by {cost.source})"
