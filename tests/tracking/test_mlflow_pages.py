"""The table of arms by depths, where some runs are too short to train and are measured instead."""

import math
from pathlib import Path

from normscale.tracking.manifest import Cell, Manifest
from normscale.tracking.mlflow_pages import _table
from normscale.tracking.reader import RunRecord, Series


def record(gap: float, **numbers: float) -> RunRecord:
    series = {name: Series([1], [1], [1], [value]) for name, value in numbers.items()}
    end = {"outcome": "finished", "summary": {"gap": gap}}
    start = {"config": {"train": {"optim": {"lr": 0.1}}}}
    return RunRecord(Path("run"), "run", start, series, {}, [], end, 1)


def manifest(family: str, *arms: str) -> Manifest:
    cells = tuple(
        Cell(
            run=arm, arm=arm, cell=f"L0006 {arm}", depth=6, seed=0, role="main", name=f"{arm} L6", lr=0.1, outcome=None
        )
        for arm in arms
    )
    return Manifest(id="a", profile="cpu", family=family, says="", source="", t=0, cells=cells)


def test_a_mixed_claim_shows_gaps_and_updates() -> None:
    records = {"trained": record(0.5), "short": record(-2.0, update=0.01)}
    head, _, one, two = _table(manifest("depth", *records), records, {"trained": "trained", "short": "measured"})
    assert head == "| gap, nats (log10 update / lr of runs that are measured)&emsp; | L0006&emsp; |"
    assert (one, two) == ("| trained | 0.5 |", "| short | -1 (1 measured) |")


def test_a_claim_about_gradients_shows_these() -> None:
    records = {"post": record(-2.0, grad_last_out=0.1)}
    head, _, row = _table(manifest("signals", *records), records, {"post": "measured"})
    assert head == "| log10 gradient&emsp; | L0006&emsp; |"
    assert row == "| post | -1 |"
    vanished = {"post": record(-2.0, grad_last_out=math.nan)}
    assert _table(manifest("signals", *vanished), vanished, {"post": "measured"})[-1] == "| post | none |"
