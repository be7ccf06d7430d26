"""Runs claims: their missing runs through a pool of workers, then the judge, the figures, the report, the links.

Finished runs are found by what they are, not by where they were asked for, so a claim that was interrupted, or shares
runs with another, continues where it was. Two runners may work on the same folder: a run that one of them holds is
waited for by the other.
"""

import itertools
import math
import shlex
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from normscale.arguments import to_stderr
from normscale.claims.claim import GPU_PROFILES, Cell, Claim, ProfileName, work_config
from normscale.claims.cost import ENOUGH, Cost, Device, fitted, from_finished, hours, work_of
from normscale.claims.discover import experiments_folder, list_claims, select
from normscale.claims.manifest import cells_of, outcomes_of, write_manifest
from normscale.claims.parts import Part, agree, leased, refuse_while_leased
from normscale.claims.plans import Plan, Work, cut_of, jobs_of, plans_of, runs_of, take_out_late, within
from normscale.claims.progress import RunsProgress, time_left
from normscale.claims.report import Written, readable, writable, write_report
from normscale.claims.waiting import wait_for_others
from normscale.claims.workers import Job, Pool, cores, environment
from normscale.config.load import revise
from normscale.config.schema import RunConfig, TrackingConfig
from normscale.errors import BadInput
from normscale.measures.config import MeasureConfig
from normscale.progress import duration
from normscale.tracking.sink_process import Sink, links, port_of_claims, ui_words
from normscale.tracking.ui_port import HERE

Configs = Sequence[tuple[Claim, list[tuple[Cell, Work]]]]

TRIAL_LAYERS = (2, 12)
TRIAL_STEPS = 6
SYNC_S = 180.0  # that the last sync into MLflow may take
AROUND_S = 15.0  # starting the workers, the report and the last sync; empirical


def run_claims(
    ids: Sequence[str],
    profile: ProfileName,
    *,
    runs: Path,
    uri: str | None,
    workers: int | None = None,
    reports: Path = Path("reports"),
    part: Part | None = None,
    then_judge: bool = False,
    hours: float | None = None,
) -> int:
    """Runs, judges and reports claims (`core`: all core claims); returns 0 when every run has a result, else 1.

    With `part`, its share of the runs alone: no verdict, no report, nothing sent to MLflow. When every part has ended,
    a start without one finds their runs done, and judges; `then_judge` waits for the other parts and does so.

    With `hours`, as many of the runs as they pay for, the claims that tell most a minute first (see `budget`); no
    run begins that would not end within them. A start with the same hours again goes on.

    What the results say does not change the code: a refuted claim is a success. The report also shows the other
    claims of the checkout, from what is stored of them, but a smoke report does not.

    Raises:
        BadInput: a claim, a folder or the tracking address cannot be used; no run was started.
        RunFailed: nobody works on the other parts.
        KeyboardInterrupt: it was interrupted; the message says what is kept.
    """
    listed = list_claims()
    claims = select(list(ids), listed, profile)
    runs, reports = runs.absolute(), reports.absolute()
    _check_asked(workers, part, hours)
    configs = [
        (claim, [(cell, work_config(claim, cell, str(runs), uri)) for cell in claim.cells(profile)]) for claim in claims
    ]
    asked = [claim.id for claim in claims]
    if part is not None:
        code = _run_part(configs, profile, runs, workers, part)
        if code != 0 or not then_judge:
            return code
        with devices(profile), sigterm():
            plans = plans_of(configs, part)
            wait_for_others(runs, asked, profile, lambda: len(jobs_of(plans, runs)[0]))
    refuse_while_leased(runs, asked, profile)
    if profile == "smoke":  # reports/latest keeps its verdicts
        reports, listed = reports / "smoke", claims
    writable(reports)
    published = experiments_folder() / "results"
    readable(runs, [claim for claim in listed if claim.id not in asked], published)
    print(f"{', '.join(asked)}: profile {profile}", flush=True)
    with devices(profile), sigterm():
        with _Sink(runs, uri) as sink:
            plans, jobs = _train(configs, profile, runs, workers, hours=hours)
            shown = {claim.id: profile for claim in claims}
            written = write_report(runs, listed, shown, reports, published=published)
            for plan in plans:
                _note(plan, profile, runs, written)
        lost = [job for job in jobs if job.outcome != "done" and not (hours and job.outcome is None)]
        print(f"\n{written.said(asked)}")
        for line in sink.links(claims, profile):
            print(line)
    return _code(lost)


def _check_asked(workers: int | None, part: Part | None, hours: float | None) -> None:
    if workers is not None and workers < 1:
        raise BadInput(f"--workers: {workers} cannot train anything; give 1 or more")
    if hours is None:
        return
    if part is not None:
        said = "parts are cut alike on every machine, and hours are not"
        raise BadInput(f"--hours: {said}; give one of --hours and --part")
    if not math.isfinite(hours):
        raise BadInput(f"--hours: {hours:g} is no time; give a number of hours, or leave it out to run everything")
    if hours <= 0:
        raise BadInput(f"--hours: {hours:g} pays for nothing; give more")


def _run_part(configs: Configs, profile: ProfileName, runs: Path, workers: int | None, part: Part) -> int:
    """Brings this part's runs to their ends; returns 0 when each has one, else 1."""
    ids = [claim.id for claim, _ in configs]
    with devices(profile), sigterm(), leased(runs, ids, profile, part):
        print(f"{', '.join(ids)}: profile {profile}, part {part}", flush=True)
        _, jobs = _train(configs, profile, runs, workers, part)
    lost = [job for job in jobs if job.outcome != "done"]
    if not lost:
        command = shlex.join(["normscale", "claim", "run", *ids, "--profile", profile])
        print(f"part {part} is done; when all parts are, this judges: {command}")
    return _code(lost)


def _code(lost: Sequence[Job]) -> int:
    for job in lost:
        to_stderr(f"no result: {job.name}: {job.note}")
    return 1 if lost else 0


def planned(
    ids: Sequence[str],
    profile: ProfileName,
    runs: Path = Path("runs"),
    workers: int | None = None,
    part: Part | None = None,
    hours: float | None = None,
    verbose: bool = False,
) -> list[str]:
    """Returns lines that say what `run_claims` would do, and what it would cost, in all and for each claim.

    The cost is as finished runs in `runs` have it, or else runs elsewhere. If `verbose`, a line stands before for each
    run that it would start or find done: its claim, name and what sets it apart.

    Raises:
        BadInput: there is no such claim, or it cannot be run so.
    """
    _check_asked(workers, part, hours)
    claims = select(list(ids), list_claims(), profile)
    listed = claims[0].id if len(claims) == 1 else f"{len(claims)} claims"
    print(f"{listed}, profile {profile}: finding runs done and to do", flush=True)  # it takes seconds
    lines, configs = [], []
    for claim in claims:
        configs.append((claim, [(cell, work_config(claim, cell, str(runs), None)) for cell in claim.cells(profile)]))
    with devices(profile):
        plans = plans_of(configs, part)
        jobs, done = jobs_of(plans, runs, part)
        cost = from_finished(runs, device_of(profile)) or (Cost() if device_of(profile) == "cpu" else None)
        shared: list[str] = []
        if hours is not None and cost is not None:
            plans, jobs, shared = within(plans, jobs, profile, cost, hours, workers or at_a_time(profile))
        mine = runs_of(plans, part)
    for plan in plans:
        for cell, run_id in plan.cells:
            if run_id in mine:
                lines.append(f"{plan.claim.id}: {cell.name}: {_setting(plan.configs[run_id])}")
    price = _price(plans, jobs, done, cost, min(workers or at_a_time(profile), max(1, len(jobs))))
    cut = "" if part is None else f", part {part}"
    total = f"{len(lines)} runs in profile {profile}{cut}; nothing was started"
    if verbose:
        return [*lines, *price, *shared, total]
    return [*price, *shared, total, "--verbose lists the runs (make: ARGS=-v)"]


def _setting(config: Work) -> str:
    if isinstance(config, MeasureConfig):
        return " ".join([*(f"{key}={value}" for key, value in config.arguments.items()), f"seed={config.seed}"])
    optim, model = config.train.optim, config.model
    blocks = f"N={model.N} M={model.M}" if model.N else f"M={model.M}"
    return f"scheme={model.scheme} {blocks} {optim.name} lr={optim.lr:g} steps={config.train.steps} seed={config.seed}"


def device_of(profile: ProfileName) -> Device:
    return "cuda" if profile in GPU_PROFILES else "cpu"


def at_a_time(profile: ProfileName) -> int:
    """Returns the number of workers; one GPU is shared by few processes, since each holds its own context."""
    return cores() if profile not in GPU_PROFILES else 1


def _price(plans: Sequence[Plan], jobs: Sequence[Job], done: int, cost: Cost | None, workers: int) -> list[str]:
    """Returns what the jobs will cost, in all and for each claim; notes it in them."""
    if not jobs:
        cut = any(plan.left_out for plan in plans)
        return [f"nothing to do, {done} done already" if cut or not done else f"all {done} runs are done already"]
    head = f"{len(jobs)} runs to do, {done} done already; "
    if cost is None:
        lines = [head + "what they cost on this device is not known: none has finished on it"]
    else:
        for job in jobs:
            job.cost = cost.of(job.config)
        wall = time_left(jobs, workers)
        # A GPU is taken for as long as any of its workers trains.
        total = hours(sum(job.cost for job in jobs) if cost.device == "cpu" else wall, cost.device)
        about = f"about {duration(wall + AROUND_S)} with {workers} at a time, {total}"
        lines = [f"{head}{about} (estimated by {cost.source})"]
    width = max(len(plan.claim.id) for plan in plans)
    for plan in plans:
        own = [job for job in jobs if job.run_id in plan.configs]
        price = "" if cost is None else f", {hours(sum(job.cost for job in own), cost.device)}"
        lines.append(f"  {plan.claim.id:<{width}}  {len(own):>3} of {len(plan.configs):>3} runs to do{price}")
    if sum(len(plan.configs) for plan in plans) > len(runs_of(plans, None)):
        lines.append("  (runs that claims share are done once, and counted once in all)")
    return lines


def _train(
    configs: Configs,
    profile: ProfileName,
    runs: Path,
    workers: int | None,
    part: Part | None = None,
    hours: float | None = None,
) -> tuple[list[Plan], list[Job]]:
    """Brings every run of the claims, of the part, or within the hours, to its end, as far as it has one."""
    began = time.monotonic()
    until = None if hours is None else began + 3600 * hours
    cells = sum(len(own) for _, own in configs)
    size = min(workers or at_a_time(profile), cells if part is None else -(-cells // part.of))
    with Pool(size) as pool:  # the workers import torch while this process finds the runs
        plans = plans_of(configs, part)
        if part is not None:
            agree(runs, [claim.id for claim, _ in configs], profile, part, cut_of(plans))
        jobs, done = jobs_of(plans, runs, part)
        for plan in plans if hours is None else []:
            if part is None or cells_of(runs, plan.claim.id, profile) != plan.cells:  # parts leave a verdict alone
                _note(plan, profile, runs)
        device = device_of(profile)
        try:
            cost = from_finished(runs, device, enough=ENOUGH) or _trial(pool, jobs, device) if jobs else None
            shared: list[str] = []
            if hours is not None and cost is not None:
                plans, jobs, shared = within(plans, jobs, profile, cost, hours, pool.size, time.monotonic() - began)
            elif hours is not None and jobs:
                why = "as what their runs cost here is not known"
                shared = [f"{hours:g} hours cannot be divided among the claims, {why}; no run begins after them"]
            for plan in plans if hours is not None else []:
                _note(plan, profile, runs)
            print("\n".join([*_price(plans, jobs, done, cost, pool.size), *shared]), flush=True)
            if jobs:
                _drive(pool, jobs, plans if part is None else [], profile, runs, until)
            if until is not None:
                take_out_late(plans, jobs, profile)
                for plan in plans:
                    _note(plan, profile, runs)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_kept(jobs, done, pool.running)) from None
    return plans, jobs


def _trial(pool: Pool, jobs: Sequence[Job], device: Device) -> Cost | None:
    """Returns the cost of this machine, from a few steps at two depths in a folder of their own.

    They are of the first job; on a GPU of those with the smallest and the largest sublayers, since small ones take the
    time of their launches, and say nothing of the speed of large ones. None where even these failed on a GPU, of which
    nothing is known without them.
    """
    trained = [job.config for job in jobs if isinstance(job.config, RunConfig)]
    if not trained:
        return Cost(source="what their claims say", device=device)
    small, large = min(trained, key=_sublayer_flops), max(trained, key=_sublayer_flops)
    tried = [small, large] if device == "cuda" and _sublayer_flops(small) < _sublayer_flops(large) else trained[:1]
    with tempfile.TemporaryDirectory(prefix="normscale-trial-") as folder:
        trials = []
        for own, layers in itertools.product(tried, TRIAL_LAYERS):
            sides = [side for side in ("N", "M") if getattr(own.model, side)]
            settings: dict[str, object] = {
                **{f"model.{side}": layers // len(sides) for side in sides},
                "train.steps": TRIAL_STEPS,
                "train.eval_batches": 1,
            }
            settings |= {"train.schedule.warmup_steps": 0, "train.eval_every": 0, "probes.update": {}}
            config = revise(own, {**settings, "tracking.runs": folder, "tracking.uri": None})
            trials.append((config, Job("", f"trial {layers}", config)))
        pool.run([trial for _, trial in trials])
    seconds = [trial.core_s if device == "cpu" else trial.step_s for _, trial in trials]
    timed = [(config, each) for (config, _), each in zip(trials, seconds, strict=True) if each]
    return fitted(timed, "a short trial on this machine", device) or (Cost() if device == "cpu" else None)


def _sublayer_flops(config: RunConfig) -> float:
    work = work_of(config)
    return work.flops / max(1, work.sublayers)


def _drive(
    pool: Pool,
    jobs: Sequence[Job],
    plans: Sequence[Plan],
    profile: ProfileName,
    runs: Path,
    until: float | None = None,
) -> None:
    progress = RunsProgress(jobs, pool.size)

    def tell(job: Job | None) -> None:
        progress(pool.running, job)
        for plan in plans:
            if job is not None and job.run_id in plan.configs:
                _note(plan, profile, runs)

    try:
        pool.run(jobs, tell, until)
    finally:
        progress.end()


def _kept(jobs: Sequence[Job], done: int, at_work: Sequence[Job]) -> str:
    """Returns what an interruption leaves, beside `done` runs that were finished before."""
    running = sum(any(job is each for each in at_work) for job in jobs)  # a trial is none of them
    kept = done + sum(job.outcome == "done" for job in jobs)
    begun = f"; the {running} that {'was' if running == 1 else 'were'} running begin{'s' * (running == 1)} again"
    said = f"{kept} of {done + len(jobs)} runs are finished and kept; the same command goes on with the others"
    return said + begun * bool(running)


def _note(plan: Plan, profile: ProfileName, runs: Path, written: Written | None = None) -> None:
    """Writes the manifest with what is known by now; with the verdict once the report is written."""
    if not plan.cells and cells_of(runs, plan.claim.id, profile):
        return  # a budget that has no room for it now leaves what there is
    if written is None:
        write_manifest(runs, plan.claim, profile, plan.cells, {}, left_out=plan.left_out)
        return
    reported = next(reported for reported in written.claims if reported.claim.id == plan.claim.id)
    outcomes = outcomes_of(plan.claim, reported.results, plan.cells)
    figures = [reported.figure] if reported.figure else []
    write_manifest(
        runs, plan.claim, profile, plan.cells, outcomes, reported.judgement, figures, written.page, plan.left_out
    )


class _Sink:
    """The process that shows the records in MLflow while they are written; without it only the window is missing."""

    def __init__(self, runs: Path, uri: str | None) -> None:
        self.runs, self.uri = runs, uri
        self.process: Sink | None = None

    def __enter__(self) -> "_Sink":
        if self.uri is not None:
            self.process = Sink(self.runs, self.uri)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.process is None:
            return
        if kind is not None:  # interrupted: the next start, or `normscale sync`, brings MLflow up to date
            self.process.end()
        elif problem := self.process.finish(SYNC_S):
            to_stderr(problem)

    def links(self, claims: Sequence[Claim], profile: ProfileName) -> list[str]:
        """Returns the lines that lead to the claims in the MLflow UI."""
        if self.uri is None:
            return []
        port = port_of_claims(self.runs, self.uri)
        found = [line for claim in claims for line in links(self.runs, self.uri, claim.id, profile, f"{HERE}:{port}")]
        served = ui_words(self.uri, TrackingConfig().uri, port)
        how = f"`{served}` serves them; Ctrl-C there stops it"
        if served.startswith("http"):
            how = f"MLflow: {served}"
        return ["", *found, how] if found else []


@contextmanager
def devices(profile: ProfileName) -> Iterator[None]:
    """Hides GPUs from the profiles that are for a CPU, in this process and in its workers.

    A process that has asked PyTorch for GPUs before keeps its answer, and heeds ACCELERATE_USE_CPU alone.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    with environment(**hidden if profile not in GPU_PROFILES else {}):
        yield


@contextmanager
def sigterm() -> Iterator[None]:
    """Turns SIGTERM into KeyboardInterrupt, so that workers end with this process."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
