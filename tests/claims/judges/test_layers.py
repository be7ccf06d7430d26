"""Each verdict of the expectations about arrays over the layers of a model, at the bar too."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from normscale.claims.claim import Cell, Claim, Profile
from normscale.claims.expect import Along, Layered, Thirds, Trains
from normscale.claims.judges.layers import compared, describe, slope, thirds
from normscale.claims.results import Result
from normscale.claims.verdict import Judgement, judge
from normscale.tracking.reader import RunRecord
from tests.claims.synthetic import record, results
from tests.claims.test_verdict import depth_claim

RATIO = Thirds("pre", "angle", 24, compare="ratio", side="below", bar=0.7)
DIFFERENCE = Thirds("pre", "removal", 24, compare="difference", side="below", bar=0.0)
ABOVE = Thirds("pre", "stream_rms", 24, compare="ratio", side="above", bar=1.5)
ALONG = Along("pre", "stream_rms", 24, when="first", lo=0.25, hi=0.75)
Make = Callable[[Cell], RunRecord | None]


def claim_of(expectation: Layered, seeds: int = 3, **changes: Any) -> Claim:
    grid = {"pre": {24: seeds, 48: 1}, "post": {12: seeds}}
    fields: dict[str, Any] = {
        "arms": {"pre": {"model.scheme": "pre"}, "post": {"model.scheme": "post"}},
        "labels": {"pre": "Pre-Norm", "post": "Post-Norm"},
        "profiles": {"cpu": Profile(grid), "smoke": Profile(grid)},
        "control": (),
        "expect": (expectation,),
        "figure": "growth",
    }
    return depth_claim(**{**fields, **changes})


def verdict_of(expectation: Layered, make: Make, profile: Any = "cpu", seeds: int = 3) -> Judgement:
    claim = claim_of(expectation, seeds)
    return judge(claim, profile, results(claim, profile, make))


def steps_of(shallow: float, deep: float, noise: float = 0.02, first: float = 0.5) -> Make:
    """Every array is `shallow` in its first half and `deep` in its second; the stream began with the slope `first`."""

    def make(cell: Cell) -> RunRecord:
        times = 1 + noise * (cell.seed - 1)
        rows = np.where(np.arange(24) < 12, shallow, deep * times).tolist()
        start = (np.arange(1, 49.0) ** (first * times)).tolist()
        stream = np.repeat(rows, 2).tolist()
        return record(layers={"angle": [rows], "removal": [rows], "stream_rms": [start, stream]})

    return make


@pytest.mark.parametrize(
    ("expectation", "shallow", "deep", "verdict"),
    [
        (RATIO, 0.2, 0.08, "supported"),
        (RATIO, 0.2, 0.2, "refuted"),
        (RATIO, 0.2, 0.14, "inconclusive"),
        (DIFFERENCE, 0.05, 0.01, "supported"),
        (DIFFERENCE, 0.05, 0.09, "refuted"),
        (DIFFERENCE, 0.05, 0.05, "inconclusive"),
        (DIFFERENCE, -0.05, -0.09, "supported"),  # a loss that falls without the block is less than nothing
        (ABOVE, 1.0, 2.0, "supported"),
        (ABOVE, 1.0, 1.2, "refuted"),
        (ABOVE, 1.0, 1.5, "inconclusive"),
    ],
)
def test_the_interval_over_seeds_decides_between_the_thirds(
    expectation: Thirds, shallow: float, deep: float, verdict: str
) -> None:
    judgement = verdict_of(expectation, steps_of(shallow, deep))
    assert judgement.verdict == verdict
    kind = "over" if expectation.compare == "ratio" else "minus"
    measured = {item.name: item for item in judgement.measured}
    wanted = deep / shallow if expectation.compare == "ratio" else deep - shallow
    name = f"{expectation.profile} deep {kind} shallow"
    assert measured[f"pre L24 {name}"].value == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert f"post L12 {name}" in measured  # what stands beside is measured too


@pytest.mark.parametrize("side", ["above", "below"])
def test_an_interval_that_ends_at_the_bar_is_not_beyond_it(side: Any) -> None:
    def at(bar: float) -> str:
        expectation = Thirds("pre", "angle", 24, compare="ratio", side=side, bar=bar)
        return verdict_of(expectation, steps_of(0.2, 0.1)).verdict

    item = {i.name: i for i in verdict_of(RATIO, steps_of(0.2, 0.1)).measured}["pre L24 angle deep over shallow"]
    assert item.lo is not None
    assert item.hi is not None
    beyond, short = (item.lo, item.hi) if side == "above" else (item.hi, item.lo)
    assert at(short) == "refuted"
    assert at(beyond) == "inconclusive"
    assert at(beyond - 1e-6 if side == "above" else beyond + 1e-6) == "supported"


@pytest.mark.parametrize(
    ("first", "verdict"), [(0.5, "supported"), (0.0, "refuted"), (1.0, "refuted"), (0.25, "inconclusive")]
)
def test_the_slope_along_the_layers_is_that_of_the_first_record(first: float, verdict: str) -> None:
    judgement = verdict_of(ALONG, steps_of(1.0, 9.0, first=first))
    assert judgement.verdict == verdict
    measured = {item.name: item for item in judgement.measured}
    assert measured["pre L24 stream_rms slope first"].value == pytest.approx(first, abs=1e-3)


@pytest.mark.parametrize("expectation", [RATIO, DIFFERENCE, ABOVE, ALONG])
def test_missing_runs_are_no_measurement_and_smoke_is_no_verdict(expectation: Layered) -> None:
    good = steps_of(2.0, 1.0)

    def without(record_: RunRecord | None) -> Make:
        return lambda cell: record_ if cell.seed == 2 else good(cell)

    assert verdict_of(expectation, good).verdict in ("supported", "refuted")
    lost = good(claim_of(expectation).cells("cpu")[0])
    assert lost is not None
    lost.end = None
    assert verdict_of(expectation, without(None)).verdict == "inconclusive"
    assert verdict_of(expectation, without(lost)).verdict == "inconclusive"
    assert verdict_of(expectation, good, seeds=1).verdict == "inconclusive"  # one seed has no interval
    assert verdict_of(expectation, lambda cell: record()).parts[0].verdict == "not run"
    assert verdict_of(expectation, good, "smoke").verdict == "not run"
    assert verdict_of(expectation, lambda cell: None).verdict == "not run"


@pytest.mark.parametrize("expectation", [RATIO, ALONG])
def test_a_run_that_broke_off_is_no_missing_one(expectation: Layered) -> None:
    """What it recorded last is not what it is after training; what it recorded first still is."""
    good = steps_of(0.2, 0.08)

    def make(cell: Cell) -> RunRecord | None:
        made = good(cell)
        assert made is not None
        assert made.end is not None
        if cell.seed == 2:
            made.end["outcome"] = "nan"
        return made

    judgement = verdict_of(expectation, make)
    assert judgement.verdict == ("supported" if expectation is ALONG else "inconclusive")
    names = {item.name for item in judgement.measured}
    assert "pre L24 angle deep over shallow" not in names
    never = verdict_of(expectation, lambda cell: record(outcome="nan") if cell.seed == 2 else good(cell)).parts[0]
    assert (never.verdict, never.detail) == ("inconclusive", "3 of 3 runs")


def test_a_block_without_which_the_loss_is_not_finite_decides_nothing() -> None:
    rows = np.full(24, 0.1)
    rows[3] = np.inf
    assert verdict_of(DIFFERENCE, lambda cell: record(layers={"removal": [rows.tolist()]})).verdict == "inconclusive"


def test_a_control_that_fails_takes_the_verdict_back() -> None:
    claim = claim_of(RATIO, control=(Trains("pre", at=(24,)),))
    layers = {"angle": [[0.2] * 12 + [0.08] * 12]}
    for gap, verdict in ((0.8, "supported"), (0.0, "inconclusive")):
        judged = judge(claim, "cpu", results(claim, "cpu", lambda cell, gap=gap: record(gap, layers=layers)))
        assert judged.verdict == verdict
        assert any(item.name == "pre L24 gap" for item in judged.measured)  # both numbers are shown


def test_thirds_leave_out_what_was_not_measured() -> None:
    array = np.array([1.0, np.nan, 3.0, 100.0, 100.0, 100.0, 5.0, np.nan, 9.0])
    assert thirds(array) == (2.0, 7.0)
    assert compared(array, "ratio") == 3.5
    assert compared(array, "difference") == 5.0
    assert np.isnan(compared(np.full(9, np.nan), "difference"))
    assert np.isnan(compared(np.array([-1.0, 0.0, 2.0]), "ratio"))  # a ratio to less than nothing says nothing


def test_the_slope_along_layers_counts_them_from_one() -> None:
    assert slope(3.0 * np.arange(1, 40) ** 0.5) == pytest.approx(0.5)
    assert np.isnan(slope(np.array([1.0, 0.0, 2.0])))


def test_expectations_are_sentences() -> None:
    claim = claim_of(RATIO)
    assert describe(claim, RATIO) == (
        "Pre-Norm, 24 blocks: the angle by which a block turns the stream, mean of the deep third over that of the "
        "shallow third, is below 0.7 after training"
    )
    assert describe(claim, ALONG) == (
        "Pre-Norm, 24 blocks: the log-log slope of the RMS of the stream over the number of the sublayer, at "
        "initialisation, is from 0.25 to 0.75"
    )


@pytest.mark.parametrize(
    ("layers", "wanted"), [(2 * 2 + 3 * 3, 9), (2 + 3, 3), (4, 4)], ids=["sublayers", "blocks", "?"]
)
def test_of_two_stacks_the_decoder_is_looked_at(layers: int, wanted: int) -> None:
    made = record(layers={"grad_norm": [np.arange(layers).tolist()]})
    made.start["config"] = {"model": {"N": 2, "M": 3}}
    cell = depth_claim().cells("cpu")[0]
    found = Result(cell, made).layers("grad_norm")
    assert found is not None
    assert found.tolist() == list(range(layers - wanted, layers))
    made.start["config"] = {"model": {"N": 0, "M": 3}}
    assert Result(cell, made).layers("grad_norm").shape == (layers,)  # type: ignore[union-attr]
