"""Every claim of the checkout: its configurations are valid, its expectations can be judged, its smoke run runs."""

from pathlib import Path

import pytest

from normscale.claims.claim import Claim, Dies, Slope, run_config
from normscale.claims.discover import list_claims
from normscale.claims.runner import run_claims
from normscale.claims.verdict import describe, judge
from tests.claims.synthetic import by_depth, by_slope, results
from tests.claims.test_figures import SLOPES

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = {claim.id: claim for claim in list_claims(ROOT / "experiments")}
every_claim = pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)


@every_claim
def test_every_cell_of_every_profile_is_a_valid_configuration_and_named_once(claim: Claim) -> None:
    assert set(claim.profiles) >= {"smoke", "cpu", "gpu"}
    for profile in claim.profiles:
        cells = claim.cells(profile)
        assert len({cell.name for cell in cells}) == len(cells)
        for cell in cells:
            assert cell.depth == run_config(claim, cell, "runs", None).model.M


@every_claim
def test_a_reader_finds_names_reasons_and_only_numbers_that_exist(claim: Claim) -> None:
    assert set(claim.labels) == set(claim.arms)
    assert claim.says
    assert claim.how
    assert claim.differs
    for expectation in (*claim.expect, *claim.control):
        assert claim.labels[expectation.arm] in describe(claim, expectation)
    make = by_slope(SLOPES) if any(isinstance(e, Slope) for e in claim.expect) else by_depth
    measured = {item.name for item in judge(claim, "cpu", results(claim, "cpu", make)).measured}
    assert set(claim.paper) <= measured


@every_claim
def test_every_death_is_tried_at_a_lower_rate_and_one_of_the_claim_for_longer(claim: Claim) -> None:
    deaths = [expectation for expectation in claim.expect if isinstance(expectation, Dies)]
    for profile in ("cpu", "gpu"):
        roles = {(cell.arm, cell.depth, cell.role) for cell in claim.cells(profile)}  # type: ignore[arg-type]
        for arm, depth, role in roles:
            if role == "main" and any(death.arm == arm and depth >= death.at_least for death in deaths):
                assert (arm, depth, "low-lr") in roles
        assert not deaths or any(role == "long" for _, _, role in roles)


def test_the_depth_claim_follows_from_runs_as_theory_has_them() -> None:
    claim = CLAIMS["depth-postnorm-dies"]
    assert judge(claim, "cpu", results(claim, "cpu", by_depth)).verdict == "supported"


def test_the_update_claim_is_refuted_by_its_own_theory_under_adam() -> None:
    claim = CLAIMS["update-bounded"]
    judgement = judge(claim, "cpu", results(claim, "cpu", by_slope(SLOPES)))
    assert judgement.verdict == "refuted"
    assert [part.verdict for part in judgement.parts] == [
        "supported",
        "supported",
        "supported",
        "refuted",
        "supported",
        "refuted",
    ]
    assert len(judgement.headline) < 250
    assert judgement.headline.index("DeepNorm (Adam)") < judgement.headline.index("supported: Post-Norm (SGD)")


@pytest.mark.slow
def test_smoke_runs_of_all_claims_end_and_judge_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_claims(list(CLAIMS), "smoke", runs=tmp_path / "runs", uri=None, workers=1, reports=tmp_path / "reports")
    said = capsys.readouterr()
    assert code == 0, said.err
    for claim in CLAIMS:
        assert f"{claim}" in said.out
    assert said.out.count("NOT RUN") == len(CLAIMS)
    assert (tmp_path / "reports" / "smoke" / "latest" / "report.html").exists()
    assert not (tmp_path / "reports" / "latest").exists()  # a smoke run must not take the place of verdicts
