"""Each verdict of the expectations about recorded numbers over depth, at the bar too."""

from collections.abc import Callable
from typing import Any

import pytest

from normscale.claims.claim import Cell, Claim, Profile
from normscale.claims.expect import Larger, Numeric, Slope, SlopeWithin, Steeper
from normscale.claims.judges.slopes import describe, pairs_of
from normscale.claims.verdict import Judgement, judge
from normscale.tracking.reader import RunRecord
from tests.claims.synthetic import record, results
from tests.claims.test_verdict import depth_claim

DEPTHS = {6: 3, 12: 3, 24: 3, 48: 3}
Make = Callable[[Cell], RunRecord | None]


def claim_of(expectation: Numeric, grid: dict[int, int] = DEPTHS) -> Claim:
    return depth_claim(
        arms={"a": {"model.scheme": "post"}, "b": {"model.scheme": "pre", "train.optim.lr": 1e-4}},
        labels={"a": "Scheme A", "b": "Scheme B"},
        profiles={"cpu": Profile({"a": grid, "b": grid}), "smoke": Profile({"a": grid, "b": grid})},
        control=(),
        expect=(expectation,),
    )


def verdict_of(expectation: Numeric, make: Make, profile: Any = "cpu", grid: dict[int, int] = DEPTHS) -> Judgement:
    claim = claim_of(expectation, grid)
    return judge(claim, profile, results(claim, profile, make))


def gradients(slope: float, noise: float = 0.05) -> Make:
    return lambda cell: record(numbers={"grad_last_out": cell.depth**slope * (1 + noise * (cell.seed - 1))})


def updates(slope: float, times: float = 1.0, noise: float = 0.02) -> Make:
    """Arm b has slope 0.1; arm a has `slope` more, and `times` as much at the geometric mean of the depths."""

    def make(cell: Cell) -> RunRecord:
        middle = (6 * 12 * 24 * 48) ** 0.25
        update = cell.lr * cell.depth**0.1 * (1 + 0.2 * cell.seed)  # a seed is common to both arms
        if cell.arm == "a":
            update *= times * (cell.depth / middle) ** slope * (1 + noise * (cell.seed - 1))
        return record(updates={10: update}, steps=12)

    return make


WITHIN = SlopeWithin("a", "grad_last_out", step=1, lo=-0.25, hi=0.25)
STEEPER = Steeper("a", "b", "update", step=10, by=0.25)
NOT_STEEPER = Steeper("a", "b", "update", step=10, by=0.25, side="not more")
LARGER = Larger("a", "b", "update", step=10, by=1.41)


@pytest.mark.parametrize(
    ("slope", "verdict"),
    [
        (0.0, "supported"),
        (0.2, "supported"),
        (-0.2, "supported"),
        (0.23, "inconclusive"),  # an interval across either bar
        (0.26, "inconclusive"),
        (-0.26, "inconclusive"),
        (0.4, "refuted"),
        (-0.5, "refuted"),
    ],
)
def test_a_slope_is_within_when_its_whole_interval_is(slope: float, verdict: str) -> None:
    judgement = verdict_of(WITHIN, gradients(slope))
    assert judgement.verdict == verdict
    measured = {item.name: item for item in judgement.measured}
    assert measured["a slope at step 1"].value == pytest.approx(slope, abs=1e-6)
    assert measured["a slope at step 1"].label == (
        "Scheme A, slope of the gradient of the last feed-forward output matrix over depth at initialisation"
    )


def test_an_interval_that_ends_at_a_bar_is_within() -> None:
    item = {i.name: i for i in verdict_of(WITHIN, gradients(0.1)).measured}["a slope at step 1"]
    assert item.lo is not None
    assert item.hi is not None
    wide = (item.hi - item.lo) / 10
    for lo, hi, verdict in (
        (item.lo, item.hi, "supported"),
        (item.lo + wide, item.hi, "inconclusive"),
        (item.lo, item.hi - wide, "inconclusive"),
        (item.hi, 1.0, "inconclusive"),  # they touch
        (item.hi + wide, 1.0, "refuted"),
        (-1.0, item.lo - wide, "refuted"),
    ):
        made = SlopeWithin("a", "grad_last_out", step=1, lo=lo, hi=hi)
        assert verdict_of(made, gradients(0.1)).verdict == verdict, (lo, hi)


@pytest.mark.parametrize(
    ("expectation", "slope", "verdict"),
    [
        (STEEPER, 0.9, "supported"),
        (STEEPER, 0.26, "inconclusive"),
        (STEEPER, 0.0, "refuted"),
        (NOT_STEEPER, 0.0, "supported"),
        (NOT_STEEPER, -0.9, "supported"),
        (NOT_STEEPER, 0.24, "inconclusive"),
        (NOT_STEEPER, 0.9, "refuted"),
    ],
)
def test_a_difference_of_slopes(expectation: Steeper, slope: float, verdict: str) -> None:
    judgement = verdict_of(expectation, updates(slope))
    assert judgement.verdict == verdict
    measured = {item.name: item for item in judgement.measured}
    assert measured["a minus b slope at step 10"].value == pytest.approx(slope, abs=1e-6)
    assert measured["a slope at step 10"].value == pytest.approx(slope + 0.1, abs=1e-6)


def test_what_the_runs_of_a_pair_share_does_not_widen_their_difference() -> None:
    def make(cell: Cell) -> RunRecord:
        shared = (1.0, 3.0, 0.4)[cell.seed] * {12: 2.0}.get(cell.depth, 1.0)
        return record(updates={10: shared * cell.depth ** (0.5 if cell.arm == "a" else 0.1)}, steps=12)

    measured = {item.name: item for item in verdict_of(STEEPER, make).measured}
    difference, own = measured["a minus b slope at step 10"], measured["a slope at step 10"]
    assert own.lo is not None
    assert own.lo < 0.1  # alone it could be anything
    assert difference.lo == pytest.approx(0.4)


@pytest.mark.parametrize(("times", "verdict"), [(2.0, "supported"), (1.42, "inconclusive"), (1.0, "refuted")])
def test_a_ratio_is_taken_per_learning_rate(times: float, verdict: str) -> None:
    judgement = verdict_of(LARGER, updates(0.0, times))  # arm b has a tenth of arm a's rate
    assert judgement.verdict == verdict
    measured = {item.name: item for item in judgement.measured}
    assert measured["a over b at step 10"].value == pytest.approx(times, rel=1e-3)


def test_a_ratio_at_the_bar_is_not_over_it() -> None:
    hi = {item.name: item.hi for item in verdict_of(LARGER, updates(0.0)).measured}["a over b at step 10"]
    assert hi is not None
    assert verdict_of(Larger("a", "b", "update", step=10, by=hi), updates(0.0)).verdict == "refuted"
    assert verdict_of(Larger("a", "b", "update", step=10, by=hi - 1e-6), updates(0.0)).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("kind", "beyond", "short"), [("slope", "above", "not above"), ("difference", "more", "not more")]
)
def test_a_slope_at_the_bar_is_not_beyond_it(kind: str, beyond: Any, short: Any) -> None:
    def at(bar: float, side: Any) -> Judgement:
        slope = Slope("a", "update", step=10, side=side, bar=bar)
        made = slope if kind == "slope" else Steeper("a", "b", "update", step=10, by=bar, side=side)
        return verdict_of(made, updates(0.3))

    name = "a slope at step 10" if kind == "slope" else "a minus b slope at step 10"
    item = {i.name: i for i in at(0.25, beyond).measured}[name]
    assert item.lo is not None
    assert item.hi is not None
    for bar, verdict, other in (
        (item.hi, "refuted", "supported"),
        (item.hi - 1e-6, "inconclusive", "inconclusive"),
        (item.lo, "inconclusive", "inconclusive"),
        (item.lo - 1e-6, "supported", "refuted"),
    ):
        assert (at(bar, beyond).verdict, at(bar, short).verdict) == (verdict, other), bar


def test_a_ratio_that_changes_with_depth_is_no_factor() -> None:
    """Twice as large on average, from half as large to eight times: with three seeds each that is not known."""
    assert verdict_of(LARGER, updates(1.3, 2.0)).verdict == "inconclusive"


@pytest.mark.parametrize("expectation", [WITHIN, STEEPER, NOT_STEEPER, LARGER])
def test_missing_runs_are_no_measurement_and_smoke_is_no_verdict(expectation: Numeric) -> None:
    def whole(cell: Cell) -> RunRecord:
        number = cell.depth**0.1 * (1 + 0.01 * cell.seed)
        return record(updates={10: number}, numbers={"grad_last_out": number}, steps=12)

    def without(record_: RunRecord | None, **where: object) -> Make:
        return lambda cell: record_ if all(getattr(cell, k) == v for k, v in where.items()) else whole(cell)

    assert verdict_of(expectation, whole).verdict in ("supported", "refuted")
    assert verdict_of(expectation, without(None, arm="a", depth=48, seed=2)).verdict == "inconclusive"
    lost = record(updates={10: 1.0}, numbers={"grad_last_out": 1.0})
    lost.end = None
    assert verdict_of(expectation, without(lost, arm="a", depth=48, seed=2)).verdict == "inconclusive"
    for value in (0.0, float("nan"), float("inf")):
        bad = record(updates={10: value}, numbers={"grad_last_out": value}, steps=12)
        assert verdict_of(expectation, without(bad, arm="a", depth=12, seed=1)).verdict == "inconclusive"
    part = verdict_of(expectation, without(record(), arm="a")).parts[0]
    assert part.verdict == "not run"
    assert verdict_of(expectation, whole, "smoke").verdict == "not run"
    assert verdict_of(expectation, lambda cell: None).verdict == "not run"


def stopped(step: int, **kept: Any) -> RunRecord:
    """A run that stopped at a step since a number was not finite."""
    made = record(outcome="nan", **kept)
    assert made.end is not None
    made.end["summary"]["bad_step"] = step
    return made


SLOPE = Slope("a", "update", step=10, side="above", bar=0.25)


@pytest.mark.parametrize(
    ("expectation", "what"), [(SLOPE, "runs"), (STEEPER, "pairs of runs"), (LARGER, "pairs of runs")]
)
def test_a_run_that_diverged_is_no_missing_one(expectation: Numeric, what: str) -> None:
    """It was measured; no finite number came of it, so that there is nothing to fit."""
    kind = "ratio" if expectation is LARGER else "slope"

    def part_of(broken: RunRecord | None, also: RunRecord | None = None) -> Any:
        def make(cell: Cell) -> RunRecord | None:
            if cell.arm == "a" and cell.depth == 48 and cell.seed:
                return broken if cell.seed == 1 or also is None else also
            return updates(0.9, 2.0)(cell)

        return verdict_of(expectation, make).parts[0]

    for broken in (stopped(5), stopped(10, updates={1: 0.1}), record(updates={10: float("nan")})):
        part = part_of(broken)
        assert part.verdict == "inconclusive"
        assert part.brief == f"Scheme A has no {kind}: 2 of 12 {what} diverged (not finite)"
        assert part.detail == f"12 of 12 {what}, 4 depths; 2 of 12 {what} diverged (not finite)"
        assert "missing" not in part.detail
    lost = record()
    lost.end = None
    assert part_of(stopped(5), lost).detail == f"11 of 12 {what}, 4 depths; 1 of 12 {what} diverged (not finite)"
    for missing in (None, lost, stopped(11)):  # a run that stopped later should have recorded the number
        part = part_of(missing)
        assert part.verdict == "inconclusive"
        assert part.detail.endswith(f"10 of 12 {what}, 4 depths: a missing run is no measurement")
    assert part_of(record(updates={10: 0.0})).brief == f"Scheme A has no {kind}: a number is zero somewhere"


def test_where_all_runs_diverged_they_were_run() -> None:
    part = verdict_of(SLOPE, lambda cell: stopped(3)).parts[0]
    assert (part.verdict, part.brief) == (
        "inconclusive",
        "Scheme A has no slope: 12 of 12 runs diverged (not finite)",
    )


def test_a_number_from_before_a_run_diverged_counts() -> None:
    def make(cell: Cell) -> RunRecord:
        return stopped(11, updates={10: float(cell.depth)}) if cell.depth == 48 else record(updates={10: cell.depth})

    assert verdict_of(SLOPE, make).verdict == "supported"


def test_a_ratio_to_zero_is_none() -> None:
    def make(cell: Cell) -> RunRecord:
        zero = cell.arm == "b" and cell.depth == 48
        return record(updates={10: 0.0}) if zero else updates(0.9)(cell)

    assert verdict_of(STEEPER, make).parts[0].brief == "Scheme A has no slope: a number is zero somewhere"


def test_the_other_arm_counts_as_missing_too() -> None:
    def make(cell: Cell) -> RunRecord | None:
        return None if cell.arm == "b" and cell.depth == 6 and cell.seed == 0 else updates(0.9)(cell)

    judgement = verdict_of(STEEPER, make)
    assert judgement.verdict == "inconclusive"
    assert "11 of 12 pairs of runs" in judgement.parts[0].detail


def test_runs_at_another_rate_are_no_pairs() -> None:
    claim = claim_of(LARGER)
    with_low = Profile({"a": DEPTHS, "b": DEPTHS}, low_lr={"a": {48: 1}})
    claim = Claim(**{**vars(claim), "profiles": {"cpu": with_low}})
    own = results(claim, "cpu", updates(0.0))
    assert len(pairs_of(LARGER, own)) == 12


def test_one_or_two_depths_are_no_slope_but_a_ratio() -> None:
    assert verdict_of(STEEPER, updates(0.9), grid={6: 3, 48: 3}).verdict == "inconclusive"
    assert verdict_of(LARGER, updates(0.0, 2.0), grid={48: 3}).verdict == "supported"
    assert verdict_of(LARGER, updates(0.0, 2.0), grid={48: 1}).verdict == "inconclusive"  # one pair has no interval


def test_expectations_are_sentences() -> None:
    claim = claim_of(WITHIN)
    assert describe(claim, WITHIN) == (
        "Scheme A: the log-log slope of the gradient of the last feed-forward output matrix over depth, at "
        "initialisation, is from -0.25 to 0.25"
    )
    assert describe(claim, NOT_STEEPER) == (
        "Scheme A: the log-log slope of the update over depth, after 10 steps, is not more than that of Scheme B by "
        "over 0.25"
    )
    assert describe(claim, LARGER) == (
        "Scheme A: the update after 10 steps is over 1.41 times that of Scheme B, as a geometric mean over depths"
    )
