"""What a start of claims has to do: the cells of each claim, their runs, those still to be done, what hours pay for."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from normscale.arguments import to_stderr
from normscale.claims.budget import divide, said
from normscale.claims.claim import Cell, Claim, ProfileName
from normscale.claims.cost import Cost
from normscale.claims.manifest import record_of
from normscale.claims.parts import Part
from normscale.claims.workers import Job
from normscale.config.schema import RunConfig
from normscale.errors import BadInput, DataError
from normscale.measures.config import MeasureConfig

Work = RunConfig | MeasureConfig


@dataclass
class Plan:
    """A claim, its cells with the ids of their runs, and the runs it needs."""

    claim: Claim
    cells: list[tuple[Cell, str]] = field(default_factory=list)
    configs: dict[str, Work] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # what a budget had no room for, or what has no data here


def plan_of(claim: Claim, configs: list[tuple[Cell, Work]]) -> Plan:
    import torch

    from normscale.measures import run as measurement
    from normscale.train.identity import run_id_of

    torch.set_num_threads(1)  # as the workers do: it is part of what a run is

    plan = Plan(claim)
    for cell, config in configs:
        if isinstance(config, MeasureConfig):
            try:
                measurement.bound(config)  # before hours of other runs find out that this one cannot be
            except BadInput as error:
                raise BadInput(f"claim {claim.id}, {cell.name}: {error}") from None
            run_id = measurement.run_id_of(config)
        else:
            run_id = run_id_of(config)
        plan.cells.append((cell, run_id))
        plan.configs[run_id] = config
    return plan


def plans_of(configs: Sequence[tuple[Claim, list[tuple[Cell, Work]]]], part: Part | None = None) -> list[Plan]:
    """Returns the plan of each claim; one of several whose data is not here is left out, and said to be.

    Raises:
        DataError: the data of the only claim cannot be read; or of any, where each machine takes a part of the runs.
    """
    plans = []
    for claim, own in configs:
        try:
            plans.append(plan_of(claim, own))
        except DataError as error:
            if len(configs) == 1:
                raise
            if part is not None:  # a machine that has the data would cut other parts, and runs would be in none
                mend = "put it on every machine that has a part, or name the other claims alone"
                raise DataError(f"{error} (claim {claim.id}; {mend})") from None
            to_stderr(f"{claim.id} is left out: {error}")
            plans.append(Plan(claim, left_out=(f"its data cannot be read: {error}",)))
    return plans


def runs_of(plans: Sequence[Plan], part: Part | None) -> dict[str, Work]:
    """Returns the runs that the claims need, each once, or this part of them."""
    runs: dict[str, Work] = {}
    for plan in plans:
        runs |= {run_id: config for run_id, config in plan.configs.items() if run_id not in runs}
    mine = runs if part is None else part.share(list(runs.items()))
    return {run_id: runs[run_id] for run_id in mine}


def cut_of(plans: Sequence[Plan]) -> dict[str, str]:
    """Returns what parts are cut from, in words that are alike on machines whose parts leave no run out."""
    import torch

    from normscale.train.engines.ranks import device_kind
    from normscale.train.identity import sources_hash

    cuda = device_kind() == "cuda"
    return {
        "claims": " ".join(plan.claim.id for plan in plans),
        "sources": sources_hash(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else f"a CPU with {torch.backends.cpu.get_cpu_capability()}",
        "runs": hashlib.sha256("\n".join(runs_of(plans, None)).encode()).hexdigest()[:10],
    }


def jobs_of(plans: Sequence[Plan], runs: Path, part: Part | None = None) -> tuple[list[Job], int]:
    """Returns the runs that have no end yet, each once, and the number of those that have."""
    jobs: list[Job] = []
    done = 0
    names: dict[str, str] = {}
    for plan in plans:
        names = {run_id: cell.name for cell, run_id in plan.cells} | names
    for run_id, config in runs_of(plans, part).items():
        record = record_of(runs, run_id)
        if record is not None and record.finished:
            done += 1
        else:
            jobs.append(Job(run_id, names[run_id], config))
    return jobs, done


def within(
    plans: Sequence[Plan],
    jobs: Sequence[Job],
    profile: ProfileName,
    cost: Cost,
    hours: float,
    workers: int,
    gone_s: float = 0.0,
) -> tuple[list[Plan], list[Job], list[str]]:
    """Returns what hours pay for, plans and jobs in the order in which they are run, and lines that say so.

    `gone_s` are the seconds of them that are over already.
    """
    costs = {job.run_id: cost.of(job.config) for job in jobs}
    asked = [(plan.claim, plan.cells) for plan in plans]
    budget = f"a budget of {hours:g} hours"
    by_id = {plan.claim.id: plan for plan in plans}
    cut: list[Plan] = []
    ranks: dict[str, int] = {}
    lines = [f"within {budget}, what tells most a minute first:"]
    for rank, share in enumerate(divide(asked, profile, costs, 3600 * hours - gone_s, workers)):
        plan, kept = by_id[share.claim.id], {run for _, run in share.kept}
        ordered = [(cell, run) for cell, run in plan.cells if run in kept]
        configs = {run: config for run, config in plan.configs.items() if run in kept}
        cut.append(Plan(plan.claim, ordered, configs, (*plan.left_out, *said(share, budget))))
        for run in kept:
            ranks.setdefault(run, rank)
        told = "; ".join(cut[-1].left_out) or "all of it"
        lines.append(f"  {rank + 1:>2} {share.claim.id}: {len(kept)} of {len(plan.configs)} runs; {told}")
    kept_jobs = [job for job in jobs if job.run_id in ranks]
    for job in kept_jobs:
        job.rank = ranks[job.run_id]
    return cut, kept_jobs, lines


def take_out_late(plans: Sequence[Plan], jobs: Sequence[Job], profile: ProfileName) -> None:
    """Takes the runs that the time was up for out of their claims; a run of a claim's floor stays, and is missing."""
    late = {job.run_id for job in jobs if job.outcome is None}
    for plan in plans:
        names = [cell.name for cell, run in plan.cells if run in late]
        if names:
            plan.left_out = (*plan.left_out, f"the time was up before {len(names)} runs ({names[0]} among them)")
        plan.cells = [one for one in plan.cells if one[1] not in late or plan.claim.in_floor(profile, one[0])]
