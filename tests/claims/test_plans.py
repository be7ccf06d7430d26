"""Plans of several claims, one of which has no data here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normscale.claims.claim import Cell, Claim, ProfileName, work_config
from normscale.claims.cost import Cost
from normscale.claims.discover import list_claims
from normscale.claims.parts import Part
from normscale.claims.plans import Work, jobs_of, plans_of, within
from normscale.errors import BadInput, DataError

CLAIMS = {claim.id: claim for claim in list_claims(Path(__file__).parents[2] / "experiments")}
HERE = CLAIMS["final-norm"]
ELSEWHERE = replace(HERE, id="elsewhere", base={**HERE.base, "data.source": "nowhere/at/all.txt"})


def asked(claim: Claim, profile: ProfileName = "smoke") -> tuple[Claim, list[tuple[Cell, Work]]]:
    return claim, [(cell, work_config(claim, cell, "runs", None)) for cell in claim.cells(profile)]


def test_a_claim_without_its_data_is_left_out_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = plans_of([asked(ELSEWHERE), asked(HERE)])
    assert [len(plan.cells) for plan in plans] == [0, 2]
    assert "nowhere/at/all.txt" in plans[0].left_out[0]
    assert "elsewhere is left out: " in capsys.readouterr().err
    jobs, _ = jobs_of(plans, tmp_path)
    cut, kept, lines = within(plans, jobs, "smoke", Cost(), hours=1, workers=1)
    assert len(kept) == 2
    assert next(plan for plan in cut if plan.claim is ELSEWHERE).left_out == plans[0].left_out
    assert any("elsewhere: 0 of 0 runs; its data cannot be read" in line for line in lines)


def test_hours_that_are_over_pay_for_nothing(tmp_path: Path) -> None:
    plans = plans_of([asked(HERE)])
    jobs, _ = jobs_of(plans, tmp_path)
    assert len(within(plans, jobs, "smoke", Cost(), hours=1, workers=1, gone_s=3000)[1]) == 2
    assert within(plans, jobs, "smoke", Cost(), hours=1, workers=1, gone_s=3600)[1] == []


def test_the_only_claim_without_its_data_is_an_error() -> None:
    with pytest.raises(DataError, match="nowhere/at/all"):
        plans_of([asked(ELSEWHERE)])


def test_parts_are_cut_from_all_runs_or_not_at_all() -> None:
    with pytest.raises(
        DataError, match=r"^data\.source: .*nowhere/at/all.* \(claim elsewhere; put it on every machine"
    ):
        plans_of([asked(ELSEWHERE), asked(HERE)], Part(2, 2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"measure": "eps_nam"},
            r"claim eps-nan, ln-0 s0: measure: 'eps_nam' is no measurement; did you mean 'eps_nan'",
        ),
        ({"measure": ""}, "claim eps-nan, ln-0 s0: measure: String should have at least 1 character; mend the claim"),
        ({"base": {"model.M": 3}}, r"claim eps-nan, ln-0 s0: .*unexpected keyword argument 'model\.M'"),
    ],
)
def test_a_measurement_that_cannot_be_made_is_named_with_its_claim_before_any_run(
    change: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        plans_of([asked(replace(CLAIMS["eps-nan"], **change))])
