from dataclasses import replace

import pytest

from normscale.claims.claim import Claim
from normscale.claims.scale import scale_of
from tests.claims.test_figures import CLAIMS, DEPTH
from tests.claims.test_verdict import depth_claim


def test_the_scale_of_a_training_claim_is_told_from_its_settings() -> None:
    assert scale_of(DEPTH, "cpu", DEPTH.cells("cpu")) == (
        "decoder of width 64, 2 to 100 blocks; 120 to 600 steps of 512 tokens; data embedded (lm); precision fp32; "
        "up to 3 seeds"
    )
    half = replace(depth_claim(), base={**depth_claim().base, "precision.compute": "bf16", "model.N": 2})
    said = scale_of(half, "cpu", half.cells("cpu"))
    assert "encoder-decoder" in said
    assert "precision bf16" in said
    quality = CLAIMS["quality-post-over-pre"]
    assert "2293760 tokens, padding among them; data data/wmt17/train (translation)" in scale_of(
        quality, "paper", quality.cells("paper")
    )


def test_sizes_that_were_not_run_are_not_told() -> None:
    ran = [cell for cell in DEPTH.cells("cpu") if cell.depth <= 12 and cell.role == "main" and cell.seed == 0]
    said = scale_of(DEPTH, "cpu", [replace(cell, settings={}) for cell in ran])  # as a manifest has them
    assert said == (
        "decoder of width 64, 2 to 12 blocks; 120 steps of 512 tokens; data embedded (lm); precision fp32; up to 1 seed"
    )


def test_of_cells_that_the_grid_no_longer_has_depth_and_seeds_are_told() -> None:
    ran = DEPTH.cells("cpu")
    gone = [replace(cell, depth=cell.depth + 1000, settings={}) for cell in ran]
    assert scale_of(DEPTH, "cpu", gone) == (
        f"{len(gone)} runs that the claim no longer asks for, of 1002 to 1100 blocks; up to 3 seeds"
    )
    both = scale_of(DEPTH, "cpu", [*ran, *gone[:1]])
    assert both.startswith("decoder of width 64, 2 to 100 blocks; ")
    assert "; 1 run that the claim no longer asks for, of 1002 blocks; " in both


def test_a_measurement_has_seeds_alone() -> None:
    assert (
        scale_of(CLAIMS["ln-lossy"], "cpu", CLAIMS["ln-lossy"].cells("cpu"))
        == "measured, nothing trained, over 5 seeds"
    )


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_every_claim_can_tell_its_scale(claim: Claim) -> None:
    assert all(scale_of(claim, profile, claim.cells(profile)) for profile in claim.profiles)
