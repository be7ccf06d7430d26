"""DeepSpeed on two real ranks: a step that the engine skipped, explained; by itself and hidden by Accelerate."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from normscale.tracking.reader import RunRecord, read_run
from tests.integration.ranks import run_two
from tests.monitor.made import events

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra 'deepspeed'"),
]


@pytest.mark.parametrize(
    ("stage", "precision", "driver"),
    [
        (0, "fp32", "engine"),
        (1, "fp16", "engine"),
        (2, "bf16", "engine"),
        (3, "fp32", "engine"),
        (1, "fp32", "accelerate"),
        (3, "bf16", "accelerate"),
    ],
)
def test_a_skipped_step_is_explained_on_both_ranks(stage: int, precision: str, driver: str, tmp_path: Path) -> None:
    run_two("deepspeed_worker", str(stage), precision, driver, str(tmp_path), package="tests.monitor")
    one, two = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    whole = [[report for report in rank["reports"] if report[2] != "accumulating"] for rank in (one, two)]
    assert [report[1] for report in whole[0]] == [True, True, False, True, True, True]
    assert [report[:3] for report in whole[0]] == [report[:3] for report in whole[1]]
    assert len(one["reports"]) == 12
    culprits = [rank[2][4] for rank in whole]
    assert culprits[0] == culprits[1]
    expected = {"module": "blocks.1.proj", "phase": "forward", "kind": "NaN", "micro_batch": 1, "rank": 1}
    assert culprits[0] == culprits[0] | expected | {"reproduced": True}
    before, bad, after = one["weights"][1:4]
    assert all(torch.equal(a, b) for a, b in zip(bad, before, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(after, bad, strict=True))
    assert all(p.isfinite().all() for p in one["weights"][-1])
    (run,) = (tmp_path / "runs").iterdir()
    found = read_run(run)
    assert found.start["engine"] == f"deepspeed-zero{stage}"
    assert (found.profiles["stream_grad_norm"].data[:4] > 0).all()
    assert ("grad_norm" in found.profiles) == (driver == "engine")
    if driver == "engine" and stage:
        measured = [step for step in found.profiles["grad_norm"].steps if step != 3 and step <= 6]
        wanted = np.array([one["norms"][step - 1] for step in measured])
        rows = [found.profiles["grad_norm"].steps.index(step) for step in measured]
        np.testing.assert_allclose(found.profiles["grad_norm"].data[rows], wanted, rtol=1e-4)
        assert (wanted > 0).all()
        assert measured[:2] == [1, 2]
    missing = {event["what"] for event in events(found, "unavailable")}
    assert ("grad_norm" in missing) == ("grad_norm" not in found.profiles)
    if precision == "fp16":
        _stopped_at_the_floor(one, two, found)
    norms = dict(zip(found.series["grad_norm"].steps, found.series["grad_norm"].values, strict=True))
    assert norms[2] > 0
    assert not norms.get(3, float("nan")) < float("inf")  # a skipped step has no number
    assert norms[2] == pytest.approx(whole[0][1][3])


def _stopped_at_the_floor(one: dict[str, Any], two: dict[str, Any], found: RunRecord) -> None:
    """PR-015: overflows that the scale can answer are no fault; at its floor the run ends on both ranks, named."""
    assert one["reasons"] == two["reasons"] == ["accumulating", "loss scale overflow", "accumulating"]
    assert one["stopped"] == two["stopped"]
    assert (
        "step 8 (DeepSpeed ends a run whose loss scale is at its minimum): +Inf in gradient of bias" in one["stopped"]
    )
    assert "blocks.2.proj" in one["stopped"]
    assert [row["scale_before"] for row in found.ledger] == [32] * 3 + [16] * 4 + [8]
    assert [row["reason"] for row in found.ledger][-2:] == ["loss scale overflow", "non-finite gradient"]
    assert events(found, "nonfinite")[-1]["policy"] == "stop"


def test_stage_0_in_fp32_behind_accelerate_is_refused(tmp_path: Path) -> None:
    """Nothing there could keep a step from being applied."""
    run_two("deepspeed_worker", "0", "fp32", "accelerate", str(tmp_path), package="tests.monitor")
    assert "checks no gradient" in torch.load(tmp_path / "rank0.pt")["refused"]
