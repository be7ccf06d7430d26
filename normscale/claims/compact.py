"""The compact record of a claim that is published with the code: written from its runs, and read again.

A checkout carries the records that its table of verdicts rests on (`experiments/results/<id>.json`), without the runs
themselves. A report shows them where a claim was not run here.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from normscale.claims.claim import Cell, Claim, ProfileName, Role, Verdict
from normscale.claims.expect import Value, When
from normscale.claims.results import Measured, Part, Result
from normscale.claims.state import Label, State
from normscale.claims.verdict import Judgement
from normscale.errors import StoreError
from normscale.tracking.files import read_regular

if TYPE_CHECKING:
    from normscale.claims.report import Reported


class _Told(BaseModel):
    """What is read of a published record; there is more in it, for people and programs."""

    model_config = ConfigDict(allow_inf_nan=False)

    profile: ProfileName
    verdict: Verdict
    headline: str
    measured: tuple[Measured, ...]
    parts: tuple[Part, ...]
    control: tuple[Part, ...]
    cells: list["_ToldCell"]
    runs: "_ToldRuns"
    date: str
    environment: list[dict[str, Any]]


class _ToldCell(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, extra="allow")  # numbers that values look at, by their names

    run: str
    arm: str
    depth: int
    seed: int
    lr: float
    role: Role
    state: Label
    loss_val: float | None
    gap: float | None
    seconds_a_step: float | None = None


class _ToldRuns(BaseModel):
    done: int
    left_out: tuple[str, ...] = ()


NO_RECORD = State("missing", "no record")


@dataclass(frozen=True)
class KeptResult(Result):
    """A cell of a published record: what became of its run is told, the run itself is not there."""

    told: State = NO_RECORD
    seconds_a_step: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def state(self) -> State:
        return self.told

    def number(self, name: str, when: When = "last") -> float | None:
        """Returns a number that its claim judges, None where the record has none."""
        return self.numbers.get(_key(name, when))


@dataclass(frozen=True)
class Published:
    """A published record: the verdict as it was given then, its cells, when and where it was run."""

    profile: ProfileName
    judgement: Judgement
    results: list[Result]
    run_ids: list[str]
    date: str
    environment: list[dict[str, Any]]
    done: int
    left_out: tuple[str, ...]
    figure: Path | None


def compact(reported: "Reported") -> dict[str, Any]:
    """Returns what is published of a claim that was run: verdict, numbers, every cell, the kind of machine."""
    return reported.numbers() | {
        "date": time.strftime("%Y-%m-%d"),
        "environment": [_public(environment) for environment in reported.environments()],
        "cells": [
            _cell(reported.claim, result, run) for result, run in zip(reported.results, reported.run_ids, strict=True)
        ],
    }


def read_published(folder: Path, claim: Claim) -> Published | None:
    """Returns the published record of a claim, None where there is none.

    Raises:
        StoreError: the file is no such record.
    """
    path = folder / f"{claim.id}.json"
    if not path.exists():
        return None
    try:
        told = _Told.model_validate_json(read_regular(path))
    except ValidationError as error:
        wrong = error.errors()[0]
        raise _no_record(path, f"{'.'.join(map(str, wrong['loc'])) or 'the file'}: {wrong['msg']}") from None
    except OSError as error:
        raise _no_record(path, str(error.strerror)) from None
    if told.profile not in claim.profiles:
        raise _no_record(path, f"profile: the claim has no {told.profile!r}")
    figure = path.with_suffix(".png")
    return Published(
        profile=told.profile,
        judgement=Judgement(told.verdict, told.headline, told.measured, told.parts, told.control),
        results=[_kept(cell) for cell in told.cells],
        run_ids=[cell.run for cell in told.cells],
        date=told.date,
        environment=told.environment,
        done=told.runs.done,
        left_out=told.runs.left_out,
        figure=figure if figure.exists() else None,
    )


def _no_record(path: Path, why: str) -> StoreError:
    return StoreError(
        f"{path}: it is no published record ({why}); restore it (git checkout), or publish it again (normscale claim"
        " report --publish)"
    )


def seconds_a_step(result: Result) -> float | None:
    """Returns the time of a training step, None where the record has none.

    Where one thread of a CPU has trained it is that of its core, if this is less: other work on the machine does not
    lengthen it (it includes evaluations, which are a few steps' worth, so that it is more on an idle machine).
    """
    if isinstance(result, KeptResult):
        return result.seconds_a_step
    if result.record is None or not result.record.finished:
        return None
    seconds, core, steps = (result.record.summary.get(key) for key in ("train_seconds", "thread_s", "steps"))
    if not seconds or not steps:
        return None
    identity = result.record.start.get("identity", {})
    alone = (identity.get("device"), identity.get("threads")) == ("cpu", 1)
    return min(float(seconds), float(core) if core and alone else math.inf) / int(steps)


def _kept(cell: "_ToldCell") -> KeptResult:
    state = State(cell.state, "", cell.loss_val, cell.gap)
    place = Cell(cell.arm, cell.depth, cell.seed, cell.lr, cell.role)
    numbers = {key: float(value) for key, value in cell.model_dump().items() if isinstance(value, int | float)}
    return KeptResult(place, None, state, cell.seconds_a_step, numbers)


def _key(number: str, when: When) -> str:
    return number if when == "last" else f"{number} {when}"


def _public(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a published record says of a machine: what it is, not which."""
    return {key: value for key, value in environment.items() if key not in ("host", "platform")}


def _cell(claim: Claim, result: Result, run_id: str) -> dict[str, Any]:
    cell: Cell = result.cell
    told = {key: value for key, value in asdict(cell).items() if key != "settings"}
    told |= {"run": run_id, "state": result.state.label, "loss_val": result.state.loss, "gap": result.state.gap}
    if (seconds := seconds_a_step(result)) is not None:
        told["seconds_a_step"] = float(f"{seconds:.4g}")
    for quantity in claim.quantities:
        if result.record is not None and quantity in result.record.series:
            series = result.record.series[quantity]
            told[quantity] = dict(zip(map(str, series.steps), series.values, strict=True))
    judged = dict.fromkeys((e.number, e.when) for e in claim.expect if isinstance(e, Value))
    beside: dict[tuple[str, When], None] = {(n, "last"): None for n in claim.numbers if n not in {n for n, _ in judged}}
    for number, when in judged | beside:
        if (value := result.number(number, when)) is not None:
            told[_key(number, when)] = value
    for profile in claim.profiles_judged:
        if (array := result.layers(profile)) is not None:
            told[profile] = [float(f"{value:.4g}") for value in array]
    return cast(dict[str, Any], _finite(told))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value
