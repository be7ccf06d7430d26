"""The judge of `Value`, from made-up records."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from normscale.claims.claim import Cell, Claim, Profile
from normscale.claims.expect import Trains, Value
from normscale.claims.results import Result
from normscale.claims.verdict import describe, judge
from tests.claims.synthetic import measurement, record, results


def claim(*expect: Value, control: Sequence[Value | Trains] = (), seeds: int = 3) -> Claim:
    return Claim(
        id="m",
        says="It is small.",
        source="nowhere",
        family="precision",
        base={},
        arms={"ln": {}, "rms": {}},
        labels={"ln": "LayerNorm", "rms": "RMSNorm"},
        profiles={name: Profile({"ln": {0: seeds}, "rms": {0: seeds}}) for name in ("cpu", "smoke")},  # type: ignore[misc]
        control=tuple(control),
        expect=expect,
        figure="values",
        how="",
        differs=(),
        numbers={"error": "error"},
        measure="made_up",
    )


def of(values: dict[str, Sequence[float | None]]) -> Callable[[Cell], Any]:
    def make(cell: Cell) -> Any:
        value = values[cell.arm][cell.seed]
        return None if value is None else measurement({"error": value})

    return make


def verdict(expect: Value, values: dict[str, Sequence[float | None]]) -> str:
    own = claim(expect)
    return judge(own, "cpu", results(own, "cpu", of(values))).verdict


ONE = {"rms": [1.0, 1.0, 1.0]}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.9, 2.0, 2.1], "supported"),  # 95 % 1.75..2.25
        ([0.9, 1.0, 1.1], "refuted"),
        ([1.4, 1.5, 1.6], "inconclusive"),
        ([1.5, 1.5, 1.5], "refuted"),  # at the bar is not above it
        ([1.9, None, 2.1], "inconclusive"),  # a missing run is no measurement
        ([1.9, math.nan, 2.1], "inconclusive"),
        ([None] * 3, "inconclusive"),
    ],
)
def test_above_a_bar(values: list[float | None], said: str) -> None:
    assert verdict(Value("ln", "error", above=1.5), {"ln": values} | ONE) == said


@pytest.mark.parametrize(
    ("values", "said"),
    [([0.0] * 3, "supported"), ([1e-3] * 3, "refuted"), ([2e-3] * 3, "refuted"), ([0, 1e-3, 2e-3], "inconclusive")],
)
def test_below_a_bar(values: list[float], said: str) -> None:
    assert verdict(Value("ln", "error", below=1e-3), {"ln": values} | ONE) == said


@pytest.mark.parametrize(
    ("value", "said"), [(1.5, "supported"), (1.0, "refuted"), (2.0, "refuted"), (0.5, "refuted"), (3.0, "refuted")]
)
def test_between_two_bars(value: float, said: str) -> None:
    assert verdict(Value("ln", "error", above=1.0, below=2.0), {"ln": [value] * 3} | ONE) == said


def test_pairs_of_seeds_share_what_their_seed_brings() -> None:
    values = {"ln": [2.0, 20.0, 200.0], "rms": [1.0, 10.0, 100.0]}
    assert verdict(Value("ln", "error", above=1.9, than="rms"), values) == "supported"
    assert verdict(Value("ln", "error", above=2.0, than="rms"), values) == "refuted"
    assert verdict(Value("ln", "error", above=0.5, than="rms", compare="difference"), values) == "inconclusive"
    assert verdict(Value("ln", "error", above=1.9, than="rms"), values | {"rms": [0.0] * 3}) == "inconclusive"


def test_a_difference_beyond_that_of_two_other_arms() -> None:
    """Seed by seed: (3 - 1) - (2 - 1) = 1, whatever a seed brings to all four."""
    own = claim(Value("a", "error", above=0.9, than="b", compare="difference", beyond=("c", "d")))
    arms = {name: name.upper() for name in "abcd"}
    grid = {arm: {0: 3} for arm in arms}
    own = replace(own, arms={arm: {} for arm in arms}, labels=arms, profiles={"cpu": Profile(grid)})
    values: dict[str, list[float | None]] = {"a": [3, 13, 103], "b": [1, 11, 101], "c": [2, 12, 102], "d": [1, 11, 101]}
    found = judge(own, "cpu", results(own, "cpu", of(values)))
    assert (found.verdict, found.measured[0].value) == ("supported", 1)
    assert found.measured[0].name == "a minus b beyond c minus d error"
    assert describe(own, own.expect[0]) == "A: error, minus that of B, beyond that of C minus D is above 0.9"
    equal = values | {"c": [3, 13, 103]}
    assert judge(own, "cpu", results(own, "cpu", of(equal))).verdict == "refuted"
    assert judge(own, "cpu", results(own, "cpu", of(values | {"d": [1, None, 101]}))).verdict == "inconclusive"


def test_one_seed_has_no_interval_and_smoke_no_verdict() -> None:
    own = claim(Value("ln", "error", above=1.5), seeds=1)
    assert judge(own, "cpu", results(own, "cpu", of({"ln": [9.0], "rms": [1.0]}))).verdict == "inconclusive"
    judgement = judge(own, "smoke", results(own, "smoke", of({"ln": [9.0], "rms": [1.0]})))
    assert judgement.verdict == "not run"
    assert judgement.measured


def test_a_control_that_fails_leaves_everything_open() -> None:
    own = claim(Value("ln", "error", above=1.5), control=[Value("rms", "error", above=1.5)])
    found = judge(own, "cpu", results(own, "cpu", of({"ln": [9.0] * 3} | ONE)))
    assert found.verdict == "inconclusive"
    assert "the control does not hold: error (above 1.5 expected): 1 (RMSNorm)" in found.headline


def test_the_numbers_of_all_arms_are_told_and_expectations_are_sentences() -> None:
    own = claim(Value("ln", "error", above=1.5, than="rms"))
    found = judge(own, "cpu", results(own, "cpu", of({"ln": [9.0] * 3} | ONE)))
    assert {item.name: item.value for item in found.measured} == {
        "ln over rms error": pytest.approx(9),
        "ln error": 9,
        "rms error": 1,
    }
    assert describe(own, own.expect[0]) == "LayerNorm: error, over that of RMSNorm is above 1.5"
    between = Value("ln", "error", above=0, below=2, than="rms", compare="difference")
    assert describe(own, between) == "LayerNorm: error, minus that of RMSNorm is between 0 and 2"


def test_the_headline_names_a_number_and_its_bar_once() -> None:
    own = claim(Value("ln", "error", above=1.5), Value("rms", "error", above=1.5), Value("rms", "error", below=2))
    found = judge(own, "cpu", results(own, "cpu", of({"ln": [1.2] * 3} | ONE)))
    assert found.headline == (
        "REFUTED - error (above 1.5 expected): 1.2 (LayerNorm), 1 (RMSNorm); "
        "supported: error (below 2 expected): 1 (RMSNorm)"
    )


def test_a_headline_counts_what_many_others_say() -> None:
    own = claim(Value("ln", "error", above=1.5), *[Value("rms", "error", below=2.0 + n) for n in range(5)])
    found = judge(own, "cpu", results(own, "cpu", of({"ln": [1.2] * 3} | ONE)))
    assert found.headline == "REFUTED - error (above 1.5 expected): 1.2 (LayerNorm); supported: 5 others"


def test_numbers_that_nothing_is_expected_of_are_told_too() -> None:
    own = replace(claim(Value("ln", "error", above=1.5)), numbers={"error": "error", "rows": "bad rows"})
    made = results(own, "cpu", lambda cell: measurement({"error": 1.0, "rows": 0.5}))
    found = {item.label: item.value for item in judge(own, "cpu", made).measured}
    assert found == {
        f"{arm}: {name}": v for name, v in (("error", 1.0), ("bad rows", 0.5)) for arm in own.labels.values()
    }


@pytest.mark.parametrize(
    ("ln", "rms", "said"),
    [
        ([0.5, 0.6, 0.7], [None, None, None], "supported"),  # None: the run broke off
        ([None, None, None], [0.5, 0.6, 0.7], "refuted"),
        ([0.5, 0.6, 0.7], [0.4, None, 0.5], "supported"),  # better in every seed
        ([0.5, 0.6, 0.7], [0.6, None, 0.8], "inconclusive"),
        ([None, None, None], [None, None, None], "inconclusive"),
        ([0.5, 0.6, "lost"], [None, None, None], "inconclusive"),
    ],
)
def test_divergence_is_a_measurement(ln: list[Any], rms: list[Any], said: str) -> None:
    """A run that broke off has learnt less than any that did not; the seeds have to agree, since there is no mean."""
    own = replace(claim(Value("ln", "gap", above=0, than="rms", compare="difference")), measure=None)
    own = replace(own, base={"train.steps": 9, "train.optim.lr": 1e-3}, numbers={"gap": "gap"})

    def make(cell: Cell) -> Any:
        gap = (ln if cell.arm == "ln" else rms)[cell.seed]
        if gap == "lost":
            return None
        return record(outcome="nan") if gap is None else record(gap, numbers={"gap": gap})

    found = judge(own, "cpu", results(own, "cpu", make))
    assert found.verdict == said, found.headline
    assert "inf" not in found.headline


def test_numbers_of_trainings_are_their_last_first_or_largest() -> None:
    made = record(gap=0.5, steps=180, numbers={"attn_logit_max": 7.0})
    made.series["attn_logit_max"].steps[:] = [1, 90, 180]
    made.series["attn_logit_max"].values[:] = [7.0, 90.0, 30.0]
    result = Result(Cell("ln", 12, 0, 1e-3, "main"), made)
    assert [result.number("attn_logit_max", when) for when in ("first", "max", "last")] == [7.0, 90.0, 30.0]
    assert result.number("attn_logit_max", "growth") == pytest.approx(30 / 7)
    assert result.number("attn_logit_max", "drift") == 23.0
    assert result.number("loss_val") == pytest.approx(2.75)
    assert result.number("steps") == 180  # of the summary
    assert result.number("nothing") is None
    broken = Result(Cell("ln", 12, 0, 1e-3, "main"), record(outcome="nan", numbers={"attn_logit_max": 7.0}))
    assert math.isnan(broken.number("attn_logit_max") or 0)
    assert broken.number("attn_logit_max", "first") == 7.0


def rates(ln: Sequence[float], rms: Sequence[float], above: float = 1.0, than: str | None = "rms") -> Any:
    """Returns the judgement of a rate that rises to 0.05."""
    own = replace(claim(Value("ln", "rate_tolerated", above=above, than=than)), base={"train.optim.lr": 0.05})

    def made(cell: Cell) -> Any:
        return measurement({"rate_tolerated": {"ln": ln, "rms": rms}[cell.arm][cell.seed]})

    return judge(own, "cpu", [Result(replace(r.cell, lr=0.05), r.record) for r in results(own, "cpu", made)])


def test_the_mean_of_rates_is_geometric_so_that_its_interval_stays_above_0() -> None:
    found = rates([0.014, 0.038, 0.018], [0.01] * 3, above=1e-3, than=None)
    assert found.verdict == "supported"  # 95 % of the arithmetic mean -0.009..0.056
    assert f"{(0.014 * 0.038 * 0.018) ** (1 / 3):.3g}" in found.headline
    assert rates([0.0, 0.0, 0.0], [0.01] * 3, above=1e-3, than=None).verdict == "refuted"  # nothing was learnt at all
    assert rates([0.0, 0.02, 0.03], [0.01] * 3, above=1e-3, than=None).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("ln", "rms", "above", "said"),
    [
        ([0.02] * 3, [0.03] * 3, 1.0, "refuted"),
        ([0.03] * 3, [0.02] * 3, 1.0, "supported"),
        ([0.02] * 3, [0.02] * 3, 1.0, "inconclusive"),  # as near each other as evaluations are
        ([0.02, 0.02, 0.02], [0.02, 0.021, 0.021], 1.0, "inconclusive"),
        ([0.05] * 3, [0.02] * 3, 3.0, "inconclusive"),  # it may be more
        ([0.045] * 3, [0.02] * 3, 3.0, "refuted"),
        ([0.05] * 3, [0.02] * 3, 2.0, "supported"),
        ([0.03] * 3, [0.0] * 3, 3.0, "inconclusive"),  # which learnt nothing while its rate rose
        ([0.0] * 3, [0.03] * 3, 1.0, "inconclusive"),
    ],
)
def test_rates_that_are_bounds_refute_nothing(
    ln: Sequence[float], rms: Sequence[float], above: float, said: str
) -> None:
    assert rates(ln, rms, above).verdict == said
