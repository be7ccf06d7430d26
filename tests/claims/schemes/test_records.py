from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from normscale.claims.claim import Cell, Claim, Profile
from normscale.claims.expect import Trains
from normscale.claims.report import Reported, gather, publish, write_report
from normscale.claims.schemes.chart import squares_of
from normscale.claims.schemes.records import runs_of, slopes_of, square, step_time
from normscale.tracking.reader import RunRecord
from tests.claims.synthetic import SLOPES, by_slope, record
from tests.claims.test_figures import CLAIMS
from tests.claims.test_report import store
from tests.claims.test_verdict import STUCK, TRAINED, UNDECIDED, depth_claim

DIVERGED = record(0.3, outcome="nan")
WHERE = ("decoder, lm", "fp32")


def gathered(claims: Sequence[tuple[Claim, Any]], runs: Path, profile: str = "cpu") -> list[Reported]:
    for claim, make in claims:
        store(runs, claim, make, profile)
    return gather(runs, [claim for claim, _ in claims])


def by_arm(gaps: dict[str, float]) -> Any:
    def make(cell: Cell) -> RunRecord:
        return record(gap=gaps[cell.arm] - 0.01 * cell.seed, improves=0.1)

    return make


def claim_of(arms: dict[str, dict[str, Any]], name: str = "one", **changes: Any) -> Claim:
    grid = {arm: {6: 2} for arm in arms}
    fields = {"id": name, "arms": arms, "labels": {arm: arm.title() for arm in arms}, "control": ()}
    expect = tuple(Trains(arm, at=(6,)) for arm in arms)
    return depth_claim(
        **{**fields, "expect": expect, "profiles": {"cpu": Profile(grid), "smoke": Profile(grid)}}, **changes
    )


def test_a_square_has_the_worst_seed_of_the_protocol_that_suits_best(tmp_path: Path) -> None:
    arms = {"slow": {"model.scheme": "pre"}, "fast": {"model.scheme": "pre", "train.optim.lr": 1e-2}}
    runs = runs_of(gathered([(claim_of(arms), by_arm({"slow": 0.9, "fast": 0.01}))], tmp_path))
    (one,) = squares_of(runs, "pre")[WHERE].values()
    assert (one.trained, one.runs, one.word) == (2, 4, "trains")
    assert one.margin == pytest.approx(0.9 - 0.01 - 0.2)
    assert {ran.label for ran in one.best} == {"Slow"}
    assert squares_of(runs, "post") == {}


def test_seeds_that_differ_are_mixed_and_a_diverged_one_has_no_margin(tmp_path: Path) -> None:
    arms = {"pre": {"model.scheme": "pre"}}

    def make(cell: Cell) -> RunRecord:
        return record(gap=0.0, outcome="nan") if cell.seed else record(gap=0.9, improves=0.1)

    runs = runs_of(gathered([(claim_of(arms), make)], tmp_path))
    found = square(runs)
    assert found is not None
    assert (found.word, found.margin, found.trained) == ("mixed", None, 1)
    assert square([]) is None


@pytest.mark.parametrize(
    ("made", "word"),
    [
        ([TRAINED, TRAINED], "trains"),
        ([TRAINED, STUCK], "mixed"),
        ([STUCK, DIVERGED], "fails"),
        ([UNDECIDED, UNDECIDED], "undecided"),
        ([STUCK, UNDECIDED], "undecided"),  # whether it trains in some seeds is open
        ([TRAINED, UNDECIDED], "undecided"),
    ],
)
def test_a_run_that_still_moves_has_not_failed(made: list[RunRecord], word: str, tmp_path: Path) -> None:
    claim = claim_of({"pre": {"model.scheme": "pre"}})
    found = square(runs_of(gathered([(claim, lambda cell: made[cell.seed])], tmp_path)))
    assert found is not None
    assert found.word == word


def test_an_arm_that_varies_more_than_its_scheme_is_another_thing(tmp_path: Path) -> None:
    variants = {
        "options": {"model.scheme": "deepnorm", "model.scheme_options": {"constants": "mixln"}},
        "norm": {"model.scheme": "deepnorm", "model.norm": "rmsnorm"},
        "wide": {"model.scheme": "deepnorm", "model.d": 128},
    }
    runs = runs_of(gathered([(claim_of(variants), by_arm(dict.fromkeys(variants, 0.9)))], tmp_path))
    assert {ran.label for ran in runs} == {"Wide"}


def test_precision_and_topology_are_told_apart_and_smoke_does_not_count(tmp_path: Path) -> None:
    arms = {"half": {"model.scheme": "pre", "precision.compute": "bf16"}, "both": {"model.scheme": "pre", "model.N": 2}}
    reported = gathered([(claim_of(arms), by_arm({"half": 0.9, "both": 0.9}))], tmp_path / "runs")
    assert set(squares_of(runs_of(reported), "pre")) == {("decoder, lm", "bf16"), ("encoder-decoder, span", "fp32")}
    assert runs_of(gathered([(claim_of(arms), by_arm({"half": 0.9, "both": 0.9}))], tmp_path / "smoke", "smoke")) == []


def test_a_run_that_claims_share_counts_once(tmp_path: Path) -> None:
    first = gathered([(claim_of({"pre": {"model.scheme": "pre"}}), by_arm({"pre": 0.9}))], tmp_path)
    assert len(runs_of(first * 2)) == len(runs_of(first)) == 2


def test_published_records_tell_the_same(tmp_path: Path) -> None:
    claim = claim_of({"pre": {"model.scheme": "pre"}})
    here = gathered([(claim, by_arm({"pre": 0.9}))], tmp_path / "runs")
    publish(write_report(tmp_path / "runs", [claim], reports=tmp_path / "reports"), tmp_path / "published")
    there = gather(tmp_path / "empty", [claim], published=tmp_path / "published")
    assert runs_of(there) == runs_of(here)


def test_step_times_are_compared_within_a_claim(tmp_path: Path) -> None:
    def make(seconds: dict[str, float]) -> Any:
        def timed(cell: Cell) -> RunRecord:
            made = record(gap=0.9, improves=0.1)
            assert made.end is not None
            made.end["summary"]["train_seconds"] = 180 * seconds[cell.arm]
            return made

        return timed

    plain = {"pre": {"model.scheme": "pre"}, "peri": {"model.scheme": "peri"}}
    alone = {"peri": {"model.scheme": "peri"}}
    made = [
        (claim_of(plain), make({"pre": 0.2, "peri": 0.3})),
        (claim_of(alone, "two"), make({"peri": 9.0})),  # with nothing beside it
    ]
    runs = runs_of(gathered(made, tmp_path))
    assert step_time(runs, "peri") == (pytest.approx(1.5), 1)
    assert step_time(runs, "pre") is None
    assert step_time(runs, "post") is None


def test_slopes_come_with_their_claims(tmp_path: Path) -> None:
    reported = gathered([(CLAIMS["update-bounded"], by_slope(SLOPES))], tmp_path)
    found = {item.name: item.value for _, item in slopes_of(reported, "deepnorm")}
    assert found["deepnorm-sgd slope at step 10"] == pytest.approx(0.03, abs=0.01)
    assert not any(name.startswith(("weights", "post")) for name in found)  # no gains: another model
