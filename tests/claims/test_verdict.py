from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from normscale.claims.claim import Cell, Claim, Profile, Verdict
from normscale.claims.expect import Dies, Slope, Trains
from normscale.claims.results import Finding, worst
from normscale.claims.verdict import Judgement, judge
from normscale.tracking.reader import RunRecord
from tests.claims.synthetic import record, results

TRAINED, STUCK, UNDECIDED = record(0.8, 0.1), record(0.01), record(0.15)
Make = Callable[[Cell], RunRecord | None]


def depth_claim(**changes: Any) -> Claim:
    fields: dict[str, Any] = {
        "id": "dies",
        "says": "Post dies.",
        "source": "a paper",
        "family": "depth",
        "base": {"train.optim.lr": 1e-3, "train.steps": 180, "train.eval_every": 30},
        "arms": {"post": {"model.scheme": "post"}, "deepnorm": {"model.scheme": "deepnorm"}},
        "labels": {"post": "Post-Norm", "deepnorm": "DeepNorm"},
        "profiles": {
            name: Profile(
                {"post": {2: 2, 24: 3, 48: 1}, "deepnorm": {24: 2, 48: 1}}, {"post": {24: 1, 48: 1}}, {"post": {24: 1}}
            )
            for name in ("smoke", "cpu")
        },
        "control": (Trains("post", at=(2,)),),
        "expect": (Dies("post", at_least=24, beside=("deepnorm",)), Trains("deepnorm", at_least=24)),
        "figure": "gap",
        "how": "",
        "differs": (),
    }
    return Claim(**{**fields, **changes})


def as_expected(cell: Cell) -> RunRecord | None:
    return STUCK if cell.arm == "post" and cell.depth >= 24 else TRAINED


def but(wanted: Callable[[Cell], bool], record: RunRecord | None) -> Make:
    """Returns what is expected, with other records for some cells."""
    return lambda cell: record if wanted(cell) else as_expected(cell)


def verdict_of(make: Make, profile: Any = "cpu") -> Judgement:
    return judge(depth_claim(), profile, results(depth_claim(), profile, make))


def test_supported_and_the_headline_says_it_in_numbers() -> None:
    judgement = verdict_of(as_expected)
    assert judgement.verdict == "supported"
    assert judgement.headline == (
        "SUPPORTED - Post-Norm stays at the unigram entropy from 24 blocks on (gap at most 0.01 nats); "
        "DeepNorm trains at 24 and 48 blocks (gap at least 0.80 nats)"
    )
    gaps = {item.name: item for item in judgement.measured}
    assert gaps["post L24 gap"].value == pytest.approx(0.01)
    assert gaps["post L24 low-lr gap"].lo is None
    assert gaps["deepnorm L24 gap"].lo is not None


def test_a_nan_run_is_a_measurement_and_dead() -> None:
    nan = but(lambda cell: cell.arm == "post" and cell.depth == 48, record(0.3, outcome="nan"))
    assert verdict_of(nan).verdict == "supported"


@pytest.mark.parametrize(
    ("where", "made", "verdict"),
    [
        ({"role": "main", "depth": 24, "seed": 2}, TRAINED, "refuted"),  # one seed that trains is enough
        ({"role": "main", "depth": 24, "seed": 2}, UNDECIDED, "inconclusive"),
        ({"role": "main", "depth": 24, "seed": 2}, None, "inconclusive"),
        ({"role": "main", "depth": 24, "seed": 2}, record(0.0, 0.02), "inconclusive"),  # exactly 0.02: still moving
        ({"role": "main", "depth": 24, "seed": 2}, record(0.0, 0.0199), "supported"),
        ({"role": "low-lr", "depth": 48}, TRAINED, "refuted"),
        ({"role": "low-lr", "depth": 48}, UNDECIDED, "inconclusive"),
        ({"role": "low-lr", "depth": 48}, None, "inconclusive"),
        ({"role": "long"}, TRAINED, "refuted"),
        ({"role": "long"}, UNDECIDED, "inconclusive"),
        ({"role": "long"}, None, "inconclusive"),
        ({"role": "long"}, record(0.0, outcome="nan"), "supported"),
    ],
)
def test_a_death_must_last(where: dict[str, Any], made: RunRecord | None, verdict: str) -> None:
    def wanted(cell: Cell) -> bool:
        return cell.arm == "post" and all(getattr(cell, key) == value for key, value in where.items())

    assert verdict_of(but(wanted, made)).verdict == verdict


def test_a_death_that_was_not_tried_at_a_lower_rate_is_none() -> None:
    claim = depth_claim(profiles={"cpu": Profile({"post": {2: 1, 24: 1}, "deepnorm": {24: 1}})})
    judgement = judge(claim, "cpu", results(claim, "cpu", as_expected))
    assert judgement.verdict == "inconclusive"
    assert "not tried at a 3x lower learning rate" in judgement.headline


@pytest.mark.parametrize(
    ("low", "verdict", "says"),
    [
        (STUCK, "refuted", "at 48 blocks, at a 3x lower learning rate too"),
        (record(0.3, outcome="nan"), "refuted", "lower learning rate too"),
        (TRAINED, "inconclusive", "but not at a 3x lower learning rate"),
        (UNDECIDED, "inconclusive", "but not at a 3x lower learning rate"),
        ("not there", "inconclusive", "where no lower learning rate was tried"),
    ],
)
def test_what_should_train_is_refuted_by_a_death_that_lasts(low: Any, verdict: str, says: str) -> None:
    lower = {} if low == "not there" else {"deepnorm": {48: 1}}
    claim = depth_claim(
        profiles={"cpu": Profile({"post": {2: 1}, "deepnorm": {24: 1, 48: 1}}, lower)},
        expect=(Trains("deepnorm", at_least=24),),
    )

    def make(cell: Cell) -> RunRecord | None:
        if cell.arm != "deepnorm" or cell.depth != 48:
            return TRAINED
        return low if cell.role == "low-lr" else STUCK

    judgement = judge(claim, "cpu", results(claim, "cpu", make))
    assert judgement.verdict == verdict
    assert says in judgement.headline


@pytest.mark.parametrize("made", [STUCK, UNDECIDED, None, record(0.9, outcome="nan")])
def test_a_failed_control_makes_everything_inconclusive(made: RunRecord | None) -> None:
    judgement = verdict_of(but(lambda cell: cell.role == "control" and cell.seed == 1, made))
    assert judgement.verdict == "inconclusive"
    assert judgement.headline.startswith("INCONCLUSIVE - the control does not hold: Post-Norm ")


def test_a_failed_control_also_takes_back_a_refutation() -> None:
    def make(cell: Cell) -> RunRecord:
        return STUCK if cell.role == "control" else TRAINED

    assert verdict_of(make).verdict == "inconclusive"


def test_where_nothing_trains_the_protocol_is_to_blame_for_the_deaths() -> None:
    judgement = verdict_of(but(lambda cell: cell.arm == "deepnorm" and cell.depth == 48, STUCK))
    dies, trains = judgement.parts
    assert (dies.verdict, trains.verdict) == ("inconclusive", "inconclusive")
    assert judgement.verdict == "inconclusive"
    assert "DeepNorm is stuck (gap 0.01 nats) at 48 blocks, where no lower" in judgement.headline


@pytest.mark.parametrize(
    ("deepnorm", "made", "says"),
    [
        ({24: 2, 48: 1}, STUCK, "no other scheme trains either"),
        ({24: 2, 48: 1}, UNDECIDED, "no other scheme trains either"),
        ({24: 2, 48: 1}, None, "no other scheme is seen to train: DeepNorm has a run missing"),
        ({24: 2}, STUCK, "no other scheme is seen to train: DeepNorm was not run there"),
    ],
)
def test_schemes_that_were_not_run_are_not_said_to_have_failed(
    deepnorm: dict[int, int], made: RunRecord | None, says: str
) -> None:
    grid = {"post": {2: 1, 24: 3, 48: 1}, "deepnorm": deepnorm}
    claim = depth_claim(profiles={"cpu": Profile(grid, {"post": {24: 1, 48: 1}})})
    make = but(lambda cell: cell.arm == "deepnorm" and cell.depth == 48, made)
    dies = judge(claim, "cpu", results(claim, "cpu", make)).parts[0]
    assert (dies.verdict, dies.brief) == ("inconclusive", f"at 48 blocks {says}")


@pytest.mark.parametrize(
    ("pre", "brief"),
    [
        ({2: [TRAINED, TRAINED]}, ""),
        ({2: [TRAINED, None]}, "no other scheme is seen to train: Pre-Norm has a run missing"),
        ({2: [STUCK, None]}, "no other scheme trains either"),  # one that failed is enough
    ],
)
def test_one_scheme_that_trains_is_enough(pre: dict[int, list[RunRecord | None]], brief: str) -> None:
    arms = {arm: {"model.scheme": arm} for arm in ("post", "deepnorm", "pre")}
    claim = depth_claim(
        arms=arms,
        labels={"post": "Post-Norm", "deepnorm": "DeepNorm", "pre": "Pre-Norm"},
        profiles={"cpu": Profile({"post": {2: 1}, "deepnorm": {2: 1}, "pre": {2: 2}}, {"post": {2: 1}})},
        control=(),
        expect=(Dies("post", at_least=2, beside=("deepnorm", "pre")),),
    )

    def make(cell: Cell) -> RunRecord | None:
        return pre[2][cell.seed] if cell.arm == "pre" else STUCK

    part = judge(claim, "cpu", results(claim, "cpu", make)).parts[0]
    assert part.verdict == ("inconclusive" if brief else "supported")
    if brief:
        assert part.brief == f"at 2 blocks {brief}"


def test_the_runs_at_a_lower_rate_stand_with_their_depth() -> None:
    dies = verdict_of(as_expected).parts[0]
    assert [line.split(": ")[0] for line in dies.detail.split("; ")] == [
        "24 blocks",
        "lr/3, 24 blocks",
        "48 blocks",
        "lr/3, 48 blocks",
        "5x steps",
    ]


def test_an_expectation_that_was_not_run_leaves_a_claim_undecided() -> None:
    claim = depth_claim(control=(), expect=(Trains("post", at=(2,)), Trains("deepnorm", at=(96,))))
    judgement = judge(claim, "cpu", results(claim, "cpu", as_expected))
    assert [part.verdict for part in judgement.parts] == ["supported", "not run"]
    assert judgement.verdict == "inconclusive"


def test_a_missing_run_is_no_measurement_and_none_at_all_is_not_run() -> None:
    judgement = verdict_of(but(lambda cell: cell.arm == "deepnorm" and cell.depth == 48, None))
    assert judgement.verdict == "inconclusive"
    assert judgement.headline.endswith("(1 of 12 runs missing)")
    lost = record(0.8)
    lost.end = None
    assert verdict_of(lambda cell: lost).verdict == "not run"
    assert verdict_of(lambda cell: None).verdict == "not run"


def test_a_smoke_run_is_never_a_verdict() -> None:
    for make in (as_expected, lambda cell: TRAINED, lambda cell: None):
        assert verdict_of(make, "smoke").verdict == "not run"


@pytest.mark.parametrize(
    ("seeds", "says"),
    [
        ((STUCK, STUCK, record(0.05)), "stays at the unigram entropy from 24 blocks on (gap at most 0.05 nats)"),
        (
            (STUCK, STUCK, record(-2.3)),
            "is stuck at or above the unigram entropy from 24 blocks on (gap -2.30 to 0.01 nats)",
        ),
        (
            (STUCK, STUCK, record(0.9, outcome="nan")),
            "is stuck or diverges from 24 blocks on (gap 0.01 to 0.01 nats)",
        ),
        ([record(0.9, outcome="nan")] * 3, "diverges from 24 blocks on"),
    ],
)
def test_a_death_is_told_as_it_was_measured(seeds: Sequence[RunRecord], says: str) -> None:
    def make(cell: Cell) -> RunRecord | None:
        if cell.arm == "post" and cell.role == "main":
            return seeds[0] if cell.depth == 48 else seeds[cell.seed]
        return as_expected(cell)

    judgement = verdict_of(make)
    assert judgement.verdict == "supported"
    assert judgement.headline.startswith(f"SUPPORTED - Post-Norm {says}; DeepNorm")


def test_the_worst_finding_decides_and_of_equals_the_first() -> None:
    verdicts: tuple[Verdict, ...] = ("supported", "not run", "inconclusive", "refuted", "refuted")
    findings = [Finding(verdict, str(number)) for number, verdict in enumerate(verdicts)]
    assert [worst(findings[:n]).brief for n in range(1, 6)] == ["0", "1", "2", "3", "3"]


def slope_claim(side: Any, bar: float, seeds: int = 3) -> Claim:
    return depth_claim(
        profiles={"cpu": Profile({"post": {6: seeds, 12: seeds, 24: seeds, 48: seeds}})},
        control=(),
        expect=(Slope("post", "update", step=10, side=side, bar=bar),),
    )


def slope_verdict(side: Any, bar: float, slope: float, noise: float = 0.05, **changes: Any) -> Judgement:
    claim = slope_claim(side, bar, **changes)

    def make(cell: Cell) -> RunRecord:
        return record(updates={1: 0.1, 10: cell.depth**slope * (1 + noise * (cell.seed - 1))}, steps=12)

    return judge(claim, "cpu", results(claim, "cpu", make))


@pytest.mark.parametrize(
    ("side", "slope", "verdict"),
    [
        ("above", 1.0, "supported"),
        ("above", 0.0, "refuted"),
        ("above", 0.26, "inconclusive"),
        ("not above", 0.0, "supported"),
        ("not above", 1.0, "refuted"),
        ("not above", 0.24, "inconclusive"),
    ],
)
def test_a_slope_counts_when_its_whole_interval_is_on_one_side(side: str, slope: float, verdict: str) -> None:
    judgement = slope_verdict(side, 0.25, slope)
    assert judgement.verdict == verdict
    measured = {item.name: item for item in judgement.measured}["post slope at step 10"]
    assert measured.value == pytest.approx(slope, abs=1e-6)
    assert {item.name for item in judgement.measured} == {"post slope at step 1", "post slope at step 10"}


def test_an_interval_that_ends_at_the_bar_is_not_above_it() -> None:
    item = {item.name: item for item in slope_verdict("above", 0.25, 0.2).measured}["post slope at step 10"]
    lo, hi = item.lo, item.hi
    assert lo is not None
    assert hi is not None
    assert slope_verdict("above", lo, 0.2).verdict == "inconclusive"
    assert slope_verdict("above", lo - 1e-6, 0.2).verdict == "supported"
    assert slope_verdict("not above", lo, 0.2).verdict == "inconclusive"
    assert slope_verdict("not above", hi, 0.2).verdict == "supported"
    assert slope_verdict("above", hi, 0.2).verdict == "refuted"
    assert slope_verdict("not above", hi - 1e-6, 0.2).verdict == "inconclusive"


def test_a_slope_needs_all_its_runs_and_finite_numbers() -> None:
    claim = slope_claim("above", 0.25)

    def make(missing: RunRecord | None) -> Make:
        def of(cell: Cell) -> RunRecord | None:
            return missing if cell.seed == 2 and cell.depth == 48 else record(updates={10: float(cell.depth)})

        return of

    for missing in (None, record(updates={10: float("nan")}), record(updates={10: 0.0}), record(updates={1: 5.0})):
        assert judge(claim, "cpu", results(claim, "cpu", make(missing))).verdict == "inconclusive"


def test_a_slope_is_that_of_the_main_runs_alone() -> None:
    """A run at a third of the learning rate has a third of the update."""
    depths = {6: 2, 12: 2, 24: 2, 48: 2}
    profile = Profile({"post": depths}, low_lr={"post": {48: 1}}, long={"post": {24: 1}})
    claim = depth_claim(
        profiles={"cpu": profile},
        control=(Trains("post", at=(6,)),),
        expect=(Slope("post", "update", step=10, side="above", bar=0.25),),
    )

    def make(cell: Cell) -> RunRecord:
        update = float(cell.depth) * {"low-lr": 0.3, "long": 5.0}.get(cell.role, 1.0)
        return record(updates={10: update}, steps=12)

    judgement = judge(claim, "cpu", results(claim, "cpu", make))
    assert judgement.measured[0].value == pytest.approx(1.0)
    assert judgement.parts[0].detail == "slope 1.00 (95 % 1.00..1.00), 8 of 8 runs, 4 depths"


def test_slopes_share_one_topic_and_the_refuted_come_first() -> None:
    depths = {6: 1, 12: 1, 24: 1}
    slopes = {"flat": 0.0, "steep": 1.0, "steeper": 1.5, "vague": 0.25}
    claim = depth_claim(
        arms={arm: {"model.scheme": "post"} for arm in slopes},
        labels={arm: arm.capitalize() for arm in slopes},
        profiles={"cpu": Profile(dict.fromkeys(slopes, depths))},
        control=(),
        expect=tuple(Slope(arm, "update", step=10, side="not above", bar=0.25) for arm in slopes),
    )

    def make(cell: Cell) -> RunRecord:
        wobble = 1.01 if cell.depth == 12 else 1.0
        return record(updates={10: cell.depth ** slopes[cell.arm] * wobble}, steps=12)

    assert judge(claim, "cpu", results(claim, "cpu", make)).headline == (
        "REFUTED - slope of the update over depth (bar 0.25): Steep 1.00, Steeper 1.50; "
        "inconclusive: Vague 0.25 (95 % 0.14..0.36); supported: Flat 0.00"
    )


def test_two_depths_have_no_slope_to_judge() -> None:
    claim = slope_claim("above", 0.25)
    claim = replace(claim, profiles={"cpu": Profile({"post": {6: 3, 48: 3}})})
    made = results(claim, "cpu", lambda cell: record(updates={10: cell.depth * (1 + 0.01 * cell.seed)}, steps=12))
    judgement = judge(claim, "cpu", made)
    assert judgement.headline == "INCONCLUSIVE - Post-Norm has no slope: too few depths"


def test_a_verdict_is_strict_json() -> None:
    import json

    judgement = verdict_of(but(lambda cell: cell.depth == 48, record(0.3, outcome="nan")))
    told = json.loads(json.dumps(judgement.as_dict(), allow_nan=False))
    assert {"verdict", "headline", "measured", "parts"} <= set(told)
    assert set(told["parts"][0]) >= {"expect", "verdict", "detail"}
    assert set(told["measured"][0]) >= {"name", "value", "lo", "hi", "unit"}
