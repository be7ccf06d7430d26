"""Records as a training run leaves them, made up: for tests of the judge, the figures and the report."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from normscale.claims.claim import Cell, Claim, ProfileName
from normscale.claims.derived import DERIVED
from normscale.claims.expect import Value
from normscale.claims.results import Result
from normscale.tracking.reader import Profile, RunRecord, Series
from normscale.tracking.record import USER
from normscale.tracking.spool import SpoolWriter

UNIGRAM = 3.25


def series(points: dict[int, float]) -> Series:
    return Series(list(points), list(points), [step * 1000 for step in points], list(points.values()))


def record(
    gap: float = 1.0,
    improves: float = 0.0,
    outcome: str = "finished",
    updates: dict[int, float] | None = None,
    training: dict[int, float] | None = None,
    steps: int = 180,
    run_id: str = "run",
    numbers: dict[str, float] | None = None,
    layers: dict[str, list[list[float]]] | None = None,
) -> RunRecord:
    """Returns a run that ends at `gap` nats below the unigram entropy, `improves` over its last third.

    `numbers` were recorded at step 1; `layers` are arrays over layers, from the first time to the last.
    """
    loss = UNIGRAM - gap
    held_out = {0: 5.6, steps // 3: loss + 2 * improves, 2 * steps // 3: loss + improves, steps: loss}
    held_out[5 * steps // 6] = loss + improves / 2
    values = {
        "loss_val": series(dict(sorted(held_out.items()))),
        "loss_train": series(training or {step: loss + 2.4 * math.exp(-step / 9) for step in range(0, steps + 1, 10)}),
    }
    if updates:
        values["update"] = series(updates)
    values |= {name: series({1: value}) for name, value in (numbers or {}).items()}
    profiles = {
        name: Profile(at := [1, steps][-len(rows) :], [step * 1000 for step in at], np.array(rows, dtype=np.float32))
        for name, rows in (layers or {}).items()
    }
    start: dict[str, Any] = {"run_id": run_id, "config": {}, "data": {"unigram_nats": UNIGRAM}}
    summary = {"steps": steps, "seconds": 3.0, "bad_step": 17 if outcome == "nan" else -1}
    end = {"outcome": outcome, "exit_code": 0, "summary": summary}
    return RunRecord(Path("runs") / run_id, run_id, start, values, profiles, [], end, 1)


def results(claim: Claim, profile: ProfileName, make: Any) -> list[Result]:
    """Returns every cell of the profile with the record that `make(cell)` gives it."""
    return [Result(cell, make(cell)) for cell in claim.cells(profile)]


def write(runs: Path, run_id: str, made: RunRecord, config: dict[str, Any]) -> None:
    """Writes a made-up record to the runs folder as its run would have."""
    with SpoolWriter(runs / run_id, 1) as spool:
        environment = {"host": "host", "cpu": "a cpu", "torch": "2.13.0", "python": "3.12.3", "normscale": "0.1.0"}
        start = made.start | {"run_id": run_id, "config": config, "environment": environment}
        spool.start(**start)
        for name, values in made.series.items():
            key = USER + name if name in DERIVED else name  # which no run records itself
            for step, value in zip(values.steps, values.values, strict=True):
                spool.metrics(step, step, {key: value})
        for name, profile in made.profiles.items():
            for step, data in zip(profile.steps, profile.data, strict=True):
                spool.profile(step, name, data)
        if made.end is not None:
            spool.end(made.end["outcome"], made.end["exit_code"], made.end["summary"])


def by_depth(cell: Cell) -> RunRecord:
    """Returns what theory lets one expect of a depth claim's cell: Post-Norm dies from 12 blocks on."""
    wobble = 0.02 * cell.seed
    if cell.arm.startswith("post") and cell.depth >= 12:
        return record(gap=0.01 - wobble, improves=0.002)
    if cell.arm.startswith("post"):
        return record(gap=0.7 - 0.03 * cell.depth + wobble, improves=0.1)
    return record(gap=0.9 - 0.04 * math.log2(cell.depth) + wobble, improves=0.1)


def by_slope(slopes: dict[str, float]) -> Any:
    """Returns a maker of update records that grow with depth by the arm's slope."""

    def make(cell: Cell) -> RunRecord:
        update = 1e-4 * cell.depth ** slopes[cell.arm] * (1.0, 1.04, 0.96)[cell.seed]
        return record(updates={1: update / 10, 10: update}, steps=12)

    return make


THEORY = {"post-sgd": 1.05, "post-adam": 1.26, "weights-sgd": 0.03, "weights-adam": 0.51}
SLOPES = {
    **THEORY,
    "deepnorm-sgd": 0.03,
    "deepnorm-adam": 0.51,
    "both-sgd": 0.03,
    "alpha-sgd": 1.2,
    "beta-sgd": 0.52,
    "neither-sgd": 1.05,
    "paper-sgd": 0.03,
    "mixln-sgd": 0.9,
    "keel-sgd": -0.01,
    "paper-two": 0.02,
    "torchscale-two": 0.02,
    "article-two": 0.1,
}
"""Slopes of the update over depth that theory gives, by arm."""

SIZES = {"keel-sgd": 2.2, "torchscale-two": 1.3, "article-two": 1.6}
GRADIENTS = {"post": 0.0, "pre": -0.5, "deepnorm": -0.49}
FIRST = {"post": -0.51, "paper": -0.49, "keel": -0.51, "mixln": -0.9}
DYING = ("post", "alpha", "beta", "neither", "mixln")


def by_theory(claim: Claim) -> Callable[[Cell], RunRecord]:
    """Returns a maker of what theory lets one expect of any claim's cell; Post-Norm and its like die from 12 on."""

    def make(cell: Cell) -> RunRecord:
        values = {e.number: 1.0 for e in (*claim.expect, *claim.control) if isinstance(e, Value)}
        if claim.measure is not None:
            return measurement(values)
        wobble = 1 + 0.03 * math.sin(3 * cell.seed + cell.depth + 7 * list(claim.arms).index(cell.arm))
        if "update" in claim.quantities and not claim.asks_training(cell.arm):
            update = 1e-2 * cell.lr * cell.depth ** SLOPES[cell.arm] * SIZES.get(cell.arm, 1.0) * wobble
            return record(updates={1: update / 10, 10: update}, steps=12)
        if "grad_last_out" in claim.quantities:
            return record(steps=6, numbers={"grad_last_out": cell.depth ** GRADIENTS[cell.arm] * wobble})
        if "grad_first" in claim.quantities:
            return record(steps=6, numbers={"grad_first": cell.depth ** FIRST[cell.arm] * wobble})
        dying = cell.arm.startswith(DYING) and cell.depth >= 24
        gap = 0.01 * wobble if dying else 0.9 * wobble - 0.04 * math.log2(cell.depth)
        layers = _layers(cell, wobble) if claim.profiles_judged else None
        return record(gap, improves=0.002 if dying else 0.1, layers=layers, numbers=values)

    return make


def _layers(cell: Cell, wobble: float) -> dict[str, list[list[float]]]:
    blocks, sublayers = np.arange(1, cell.depth + 1), np.arange(1, 2 * cell.depth + 1)
    flat = cell.arm != "pre"
    rms = np.ones(2 * cell.depth) if flat else np.sqrt(1 + sublayers / 2)
    angle = np.full(cell.depth, 0.1) if flat else 0.3 / np.sqrt(blocks)
    removal = np.full(cell.depth, 0.05) if flat else 0.2 / blocks
    removal[5::3] = np.nan
    grad = sublayers ** (0.5 if cell.arm.startswith("post") else 0.0)
    found = {"angle": [angle * wobble], "removal": [removal * wobble], "stream_rms": [rms, rms**1.4 * wobble]}
    found["grad_norm"] = [grad, grad**2 * wobble]
    return {name: [row.tolist() for row in rows] for name, rows in found.items()}


def measurement(numbers: dict[str, float], run_id: str = "run") -> RunRecord:
    """Returns the record of a measurement that gave these numbers."""
    values = {USER + name: series({0: value}) for name, value in numbers.items()}
    end = {"outcome": "finished", "exit_code": 0, "summary": {"seconds": 0.1, "steps": 1}}
    start: dict[str, Any] = {"run_id": run_id, "config": {"measure": "made_up"}}
    return RunRecord(Path("runs") / run_id, run_id, start, values, {}, [], end, 1)
