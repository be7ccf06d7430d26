"""What is measured of a step does not depend on how many ranks make it."""

from pathlib import Path

import pytest
import torch

from tests.integration.depth_worker import step
from tests.integration.ranks import run_two

SAMPLED = ("attn_logit_max", "attn_entropy", "angle_online")  # each rank samples as many positions as one alone would


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(tmp_path: Path) -> None:
    run_two("depth_worker", str(tmp_path), timeout=200)
    one, two = step(), [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert (one["world"], two[0]["world"]) == (1, 2)
    # Targets, loss, sums and maxima; with DDP's own reductions made in C++ none of it depends on the depth.
    assert two[0]["collectives"] == two[1]["collectives"] == 4
    assert set(one["profiles"]) == set(two[0]["profiles"]) >= {"stream_grad_norm", "z_rms", "update_rel"}
    for name, profile in one["profiles"].items():
        for rank in two:
            assert torch.equal(rank["profiles"][name].nan_to_num(), two[0]["profiles"][name].nan_to_num()), name
        if name in SAMPLED:
            assert torch.equal(two[0]["profiles"][name].isfinite(), profile.isfinite()), name
        else:
            torch.testing.assert_close(two[0]["profiles"][name], profile, rtol=1e-3, atol=1e-5, msg=name)
    for name in ("logz_mean", "logz_max", "headroom", "stream_growth", "update_rel_max", "grad_max", "grad_slope_now"):
        assert two[0]["scalars"][name] == pytest.approx(one["scalars"][name], rel=2e-3), name
