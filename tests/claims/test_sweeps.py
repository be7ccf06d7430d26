"""The judge of learning-rate sensitivity, from made-up records."""

from pathlib import Path
from typing import Any

import pytest

from normscale.claims.claim import Cell, Claim, Profile
from normscale.claims.expect import Sensitive, Shifts
from normscale.claims.figures.drawing import draw
from normscale.claims.judges.sweeps import kept_loss, sensitivities
from normscale.claims.results import Result
from normscale.claims.verdict import judge
from tests.claims.synthetic import UNIGRAM, record, results

RATES = (1e-3, 1e-2, 1e-1)
CLAIM = Claim(
    id="s",
    says="It is sensitive.",
    source="nowhere",
    family="quality",
    base={"train.steps": 9, "train.optim.lr": 1e-3},
    arms={"pre": {}},
    labels={"pre": "Pre-Norm"},
    profiles={"cpu": Profile({}, sweep={"pre": {6: 2, 24: 2}}, floor={"pre": {6: 1, 24: 2}})},
    control=(),
    expect=(Sensitive("pre", 24, than="pre", than_at=6),),
    figure="sweep",
    how="",
    differs=(),
    rates=RATES,
)


def made(deep: dict[float, Any], shallow: dict[float, Any]) -> list[Result]:
    """Losses are UNIGRAM minus the number given; None is a run that broke off."""

    def make(cell: Cell) -> Any:
        gap = (deep if cell.depth == 24 else shallow)[cell.lr]
        if gap == "missing":
            return None
        return record(outcome="nan") if gap is None else record(gap + 0.01 * cell.seed)

    return results(CLAIM, "cpu", make)


FLAT = dict.fromkeys(RATES, 1.0)


def test_a_sweep_is_every_rate_of_every_cell_with_a_name_of_its_own() -> None:
    cells = CLAIM.cells("cpu")
    assert len(cells) == 2 * 2 * 3
    assert len({cell.name for cell in cells}) == 12
    assert {cell.settings["train.optim.lr"] for cell in cells} == set(RATES)
    assert cells[1].name == "L0006 pre s0 lr1.0e-02"
    assert sum(CLAIM.in_floor("cpu", cell) for cell in cells) == 3 * 3


def test_the_sensitivity_is_the_mean_minus_the_best_and_a_broken_run_counts_as_at_its_beginning() -> None:
    found = sensitivities(CLAIM, "pre", 24, made({1e-3: 1.0, 1e-2: 0.4, 1e-1: None}, FLAT))
    first = 5.6  # of every made-up run
    mean = ((UNIGRAM - 1.0) + (UNIGRAM - 0.4) + first) / 3
    assert found[0] == pytest.approx(mean - (UNIGRAM - 1.0))
    worse = Result(Cell("pre", 24, 0, 1e-3, "sweep"), record(gap=-9.0))
    assert kept_loss(worse) == first  # nothing is worse than not to have trained


@pytest.mark.parametrize(
    ("deep", "said"),
    [
        ({1e-3: 1.0, 1e-2: 0.9, 1e-1: None}, "supported"),
        (FLAT, "refuted"),
        ({1e-3: 1.0, 1e-2: 1.0, 1e-1: "missing"}, "inconclusive"),
    ],
)
def test_verdicts(deep: dict[float, Any], said: str) -> None:
    assert judge(CLAIM, "cpu", made(deep, FLAT)).verdict == said


def test_equal_sensitivities_are_not_more_and_the_report_has_them_all() -> None:
    steep = {1e-3: 1.0, 1e-2: 0.5, 1e-1: 0.0}
    found = judge(CLAIM, "cpu", made(steep, steep))
    assert found.verdict == "refuted"
    assert {item.name for item in found.measured} == {"pre L6 sensitivity", "pre L24 sensitivity"}


def test_it_is_drawn(tmp_path: Path) -> None:
    assert draw(CLAIM, made(FLAT, FLAT), tmp_path / "sweep.png")
    assert not draw(CLAIM, [], tmp_path / "nothing.png")


SHIFTS = Claim(
    **{
        **vars(CLAIM),
        "arms": {"low": {}, "high": {}},
        "labels": {"low": "low gain", "high": "high gain"},
        "profiles": {"cpu": Profile({}, sweep={"low": {6: 2}, "high": {6: 2}}, floor={"low": {6: 2}})},
        "expect": (Shifts("low", 6, than="high", by=20.0),),
        "rates": tuple(10.0**power for power in range(-5, 3)),
    }
)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        ((1e1, 1e1), (1e-2, 1e-2), "supported"),
        ((1e-4, 1e-4), (1e-1, 1e-1), "supported"),  # in either direction
        ((1e-2, 1e-2), (1e-2, 1e-2), "refuted"),
        ((1e1, 1e-1), (1e-2, 1e-2), "inconclusive"),  # the seeds do not agree
        ((1e0, 1e0), (1e-2, 1e-2), "inconclusive"),  # 100 times, which half a step on either side makes 10 to 1000
        ((1e2, 1e2), (1e2, 1e2), "inconclusive"),  # both at the end of the sweep: beyond it nothing is known
        ((1e2, 1e2), (1e-1, 1e-1), "supported"),  # at the end, and if it is beyond, so much the more
        ((1e2, 1e2), (1e0, 1e0), "inconclusive"),
    ],
)
def test_a_shift_is_judged_by_the_best_rates_of_each_seed(
    low: tuple[float, ...], high: tuple[float, ...], verdict: str
) -> None:
    def make(cell: Cell) -> Any:
        best = (low if cell.arm == "low" else high)[cell.seed]
        return record(1.0 if cell.lr == best else 0.5)

    found = judge(SHIFTS, "cpu", results(SHIFTS, "cpu", make))
    assert found.verdict == verdict, found.headline
    assert {item.name for item in found.measured} >= {"low L6 best rate", "high L6 best rate"}


def test_a_shift_at_the_boundary_is_none_and_a_missing_run_leaves_it_open() -> None:
    bar = Claim(**{**vars(SHIFTS), "expect": (Shifts("low", 6, than="high", by=10.0),)})  # a step

    def make(cell: Cell) -> Any:
        return record(1.0 if cell.lr == 1e-2 else 0.5)

    assert judge(bar, "cpu", results(bar, "cpu", make)).verdict == "refuted"
    lost = [Result(r.cell, None if r.cell.seed else r.record) for r in results(bar, "cpu", make)]
    assert judge(bar, "cpu", lost).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1e2, 1e1, "inconclusive"), (1e-4, 1e-5, "inconclusive"), (1e-5, 1e-4, "inconclusive"), (1e1, 1e0, "refuted")],
)
def test_a_best_rate_at_an_end_of_the_sweep_is_a_bound(low: float, high: float, verdict: str) -> None:
    far = Claim(**{**vars(SHIFTS), "expect": (Shifts("low", 6, than="high", by=1000.0),)})

    def make(cell: Cell) -> Any:
        return record(1.0 if cell.lr == (low if cell.arm == "low" else high) else 0.5)

    assert judge(far, "cpu", results(far, "cpu", make)).verdict == verdict
