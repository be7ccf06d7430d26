"""The survey: every scheme under one protocol, at a few depths and precisions, and under a rate that rises.

It is no claim: it expects nothing and has no verdict. What it trains is described as that of claims is, so that its
runs are found by what they are, and its records are published and read as theirs. Its runs lie beside the measurements
at initialisation, where nothing sends them to MLflow.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from normscale.claims.claim import Cell, Claim, Grid, Profile, ProfileName, Settings
from normscale.claims.compact import Published, compact, read_published, seconds_a_step
from normscale.claims.manifest import cells_of, results_of
from normscale.claims.protocol import DEPTH, DESCRIBED, RAMP_NUMBERS
from normscale.claims.report import Reported
from normscale.claims.results import Result
from normscale.claims.verdict import Judgement
from normscale.config.precision import Compute
from normscale.errors import StoreError
from normscale.schemes import scheme_names
from normscale.tracking.files import write_whole

FOLDER = "schemes"  # in the folder of runs

DEPTHS = (6, 24, 96)
PRECISIONS: Mapping[ProfileName, tuple[Compute, ...]] = {"gpu": ("fp32", "bf16", "fp16"), "cpu": ("fp32", "bf16")}
SEEDS: Mapping[ProfileName, int] = {"gpu": 3, "cpu": 1}

RISING_DEPTH = 24
RISING_STEPS, TOP = 400, 2e-2
"""The rate rises as fast as that of `depth-max-lr` (to 5e-2 in 1000 steps), and to less: so much can be paid for."""

EVERY = 10  # steps between held-out losses while it rises, as there

TRAINED, RISING = "scheme-survey", "scheme-rates"
SAYS = {
    TRAINED: "Which schemes train at which depth and precision, under one protocol.",
    RISING: "The largest learning rate that each scheme tolerates.",
}
RISES = (
    f"The rate rises in a line to {TOP:g} over {RISING_STEPS} steps, with {RISING_DEPTH} blocks in fp32. The largest "
    "is that up to which a model that has learnt stands within 0.2 nats of its lowest held-out loss; it is looked at "
    f"every {EVERY * TOP / RISING_STEPS:g}."
)


def surveys(schemes: Iterable[str]) -> dict[str, Claim]:
    """Returns the two parts of the survey of some schemes by name, described as claims are."""
    schemes = tuple(schemes)
    rising = {
        "train.steps": RISING_STEPS,
        "train.schedule.warmup_steps": RISING_STEPS,
        "train.optim.lr": TOP,
        "train.eval_every": EVERY,
        "train.eval_batches": 2,
        "probes.every": EVERY,
        "probes.profiles": False,
    }
    trained = {
        profile: _grid(schemes, precisions, DEPTHS, SEEDS[profile]) for profile, precisions in PRECISIONS.items()
    }
    risen = {profile: _grid(schemes, ("fp32",), (RISING_DEPTH,), seeds) for profile, seeds in SEEDS.items()}
    return {
        TRAINED: _described(TRAINED, schemes, DEPTH, trained, how=DESCRIBED),
        RISING: _described(
            RISING, schemes, {**DEPTH, **rising}, risen, how=RISES, numbers=RAMP_NUMBERS, to_failure=True
        ),
    }


def found(runs: Path, published: Path, schemes: Sequence[str] = ()) -> list[Reported]:
    """Returns what there is of the survey of these schemes (none named: all that have a record), a result for a cell.

    A cell that has no end in `runs` is as the folder `published` has it, where both are of one profile.

    Raises:
        StoreError: a manifest or a published record cannot be read.
    """
    everything = (_found(name, runs / FOLDER, published, schemes) for name in SAYS)
    return [one for one in everything if one is not None]


def publish(runs: Path, published: Path) -> list[Path]:
    """Writes the compact records of what there is of the survey, what was published before included; returns the files.

    What was published of a cell stays as it is, to the digit, unless a run of that cell has ended here. Runs that join
    those of another kind of machine tell no time of a step, which is only compared among runs of one. A record counts
    its runs (`done`) beside all cells of its profile (`of`), so that one that was not run, or failed, is missed.

    Raises:
        StoreError: the folder cannot be written.
    """
    files = []
    for one in found(runs, published):
        told, kept = compact(one), read_published(published, one.claim)
        planned = surveys(scheme_names())[one.claim.id].cells(one.profile or "cpu")
        told["runs"] = {"done": len(one.results), "of": len({*planned, *(result.cell for result in one.results)})}
        if kept is not None and not set(kept.run_ids).isdisjoint(one.run_ids):
            _keep_times_apart(told, one, kept)
            told["environment"] += [each for each in kept.environment if each not in told["environment"]]
        path = published / f"{one.claim.id}.json"
        try:
            write_whole(path, json.dumps(told, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise StoreError(f"{path}: cannot be written ({error.strerror})") from None
        files.append(path)
    return files


def _keep_times_apart(told: dict[str, Any], one: Reported, kept: Published) -> None:
    """Takes the time of a step from cells that were run on another kind of machine than what was published.

    Where that is of several kinds, of which only one tells times, those alone stay that were published.
    """
    machines = {environment.get("cpu") for environment in kept.environment}
    times = {run: seconds_a_step(result) for run, result in zip(kept.run_ids, kept.results, strict=True)}
    for cell, result in zip(told["cells"], one.results, strict=True):
        if result.record is None:
            continue
        elsewhere = result.record.start.get("environment", {}).get("cpu") not in machines
        if elsewhere or (len(machines) > 1 and cell.get("seconds_a_step") != times.get(cell["run"])):
            cell.pop("seconds_a_step", None)


def scheme_of(arm: str) -> str:
    """Returns the scheme of an arm, which is named after it and its precision."""
    return arm.split()[0]


def _arm(scheme: str, precision: Compute) -> str:
    return scheme if precision == "fp32" else f"{scheme} {precision}"


def _grid(schemes: Iterable[str], precisions: Iterable[Compute], depths: Iterable[int], seeds: int) -> Grid:
    return {_arm(scheme, each): dict.fromkeys(depths, seeds) for scheme in schemes for each in precisions}


def _described(
    name: str, schemes: Iterable[str], base: Settings, grids: Mapping[ProfileName, Grid], **more: Any
) -> Claim:
    arms = {
        _arm(scheme, precision): {"model.scheme": scheme, "precision.compute": precision}
        for scheme in schemes
        for precision in PRECISIONS["gpu"]
    }
    return Claim(
        id=name,
        says=SAYS[name],
        source="the schemes of this package",
        family="depth",
        base=base,
        arms=arms,
        labels={arm: arm for arm in arms},
        profiles={profile: Profile(grid) for profile, grid in grids.items()},
        control=(),
        expect=(),
        figure="gap",
        differs=("one protocol for all schemes, which is none of theirs",),
        core=False,
        **more,
    )


def _found(name: str, runs: Path, published: Path, schemes: Sequence[str]) -> Reported | None:
    for profile in SEEDS:  # the larger first
        if ended := _ended(name, runs, profile):
            break
    kept = read_published(published, surveys(())[name])
    if kept is not None and (not ended or kept.profile == profile):
        profile = kept.profile
        ended = {r.cell: (r, run) for r, run in zip(kept.results, kept.run_ids, strict=True)} | ended
    own = {cell: both for cell, both in ended.items() if not schemes or scheme_of(cell.arm) in schemes}
    if not own:
        return None
    claim = surveys(schemes or sorted({scheme_of(cell.arm) for cell in own}))[name]
    results = [result for result, _ in own.values()]
    said = Judgement("not run", f"SURVEY - {len(own)} runs; nothing is expected of them")
    return Reported(claim, profile, said, results, [run for _, run in own.values()])


def _ended(name: str, runs: Path, profile: ProfileName) -> dict[Cell, tuple[Result, str]]:
    """Returns the runs of a profile that have ended, with their ids, by cell."""
    cells = cells_of(runs, name, profile)
    found = zip(results_of(runs, cells), cells, strict=True)
    return {result.cell: (result, run) for result, (_, run) in found if result.state.label != "missing"}
