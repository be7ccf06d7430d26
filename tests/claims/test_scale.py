from dataclasses import replace

import pytest

from normscale.claims.scale import scale_of
from tests.claims.test_figures import CLAIMS, DEPTH
from tests.claims.test_verdict import depth_claim


def test_the_scale_of_a_training_claim_is_told_from_its_settings() -> None:
    assert scale_of(DEPTH, "cpu") == (
        "decoder of width 64, 2 to 100 blocks; 120 to 600 steps of 512 tokens; data embedded (lm); precision fp32; "
        "up to 3 seeds"
    )
    half = replace(depth_claim(), base={**depth_claim().base, "precision.compute": "bf16", "model.N": 2})
    said = scale_of(half, "cpu")
    assert "encoder-decoder" in said
    assert "precision bf16" in said
    assert "2293760 tokens, padding among them; data data/wmt17/train (translation)" in scale_of(
        CLAIMS["quality-post-over-pre"], "paper"
    )


def test_a_measurement_has_seeds_alone() -> None:
    assert scale_of(CLAIMS["ln-lossy"], "cpu") == "measured, nothing trained, over 5 seeds"


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_every_claim_can_tell_its_scale(claim: object) -> None:
    assert all(scale_of(claim, profile) for profile in claim.profiles)  # type: ignore[attr-defined,arg-type]
