"""Records as a training run leaves them, made up: for tests of the judge, the figures and the report."""

import math
from pathlib import Path
from typing import Any

from normscale.claims.claim import Cell, Claim, ProfileName
from normscale.claims.verdict import Result
from normscale.tracking.spool import RunRecord, Series, SpoolWriter

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
) -> RunRecord:
    """Returns a run that ends at `gap` nats below the unigram entropy, `improves` over its last third."""
    loss = UNIGRAM - gap
    held_out = {0: 5.6, steps // 3: loss + 2 * improves, 2 * steps // 3: loss + improves, steps: loss}
    held_out[5 * steps // 6] = loss + improves / 2
    values = {
        "loss_val": series(dict(sorted(held_out.items()))),
        "loss_train": series(training or {step: loss + 2.4 * math.exp(-step / 9) for step in range(0, steps + 1, 10)}),
    }
    if updates:
        values["update"] = series(updates)
    start: dict[str, Any] = {"run_id": run_id, "config": {}, "data": {"unigram_nats": UNIGRAM}}
    summary = {"steps": steps, "seconds": 3.0, "bad_step": 17 if outcome == "nan" else -1}
    end = {"outcome": outcome, "exit_code": 0, "summary": summary}
    return RunRecord(Path("runs") / run_id, run_id, start, values, {}, [], end, 1)


def results(claim: Claim, profile: ProfileName, make: Any) -> list[Result]:
    """Returns every cell of the profile with the record that `make(cell)` gives it."""
    return [Result(cell, make(cell)) for cell in claim.cells(profile)]


def write(runs: Path, run_id: str, made: RunRecord, config: dict[str, Any]) -> None:
    """Writes a made-up record to the runs folder as its run would have."""
    with SpoolWriter(runs / run_id, 1) as spool:
        environment = {"host": "host", "cpu": "a cpu", "torch": "2.13.0", "python": "3.12.3", "normscale": "0.1.0"}
        start = made.start | {"run_id": run_id, "config": config, "environment": environment}
        spool.start(**start)
        for key, values in made.series.items():
            for step, value in zip(values.steps, values.values, strict=True):
                spool.metrics(step, step, {key: value})
        if made.end is not None:
            spool.end(made.end["outcome"], made.end["exit_code"], made.end["summary"])


def by_depth(cell: Cell) -> RunRecord:
    """Returns what theory lets one expect of a depth claim's cell: Post-Norm dies from 12 blocks on."""
    wobble = 0.02 * cell.seed
    if cell.arm.startswith("post") and cell.depth >= 12:
        return record(gap=0.01 - wobble, improves=0.002)
    if cell.arm.startswith("post"):
        return record(gap=0.7 - 0.03 * cell.depth + wobble, improves=0.1)
    return record(gap=0.9 - 0.002 * cell.depth + wobble, improves=0.1)


def by_slope(slopes: dict[str, float]) -> Any:
    """Returns a maker of update records that grow with depth by the arm's slope."""

    def make(cell: Cell) -> RunRecord:
        update = 1e-4 * cell.depth ** slopes[cell.arm] * (1.05, 0.95, 1.0)[cell.seed]
        return record(updates={1: update / 10, 10: update}, steps=12)

    return make
