"""Two real processes in mixed precision: what travels between them, and that they decide alike."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from normscale.tracking.reader import RunRecord, read_run
from tests.integration.ranks import run_two


def trained(out: Path, engine: str, precision: dict[str, object]) -> tuple[list[dict[str, Any]], RunRecord]:
    """Returns what each rank saved, and the record."""
    run_two("precision_worker", str(out), engine, json.dumps(precision))
    (folder,) = (out / "runs").glob("deepnorm-*")
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)], read_run(folder)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_an_overflow_on_one_rank_halves_the_scale_on_both_and_gradients_travel_in_bf16(
    tmp_path: Path, engine: str
) -> None:
    ranks, record = trained(tmp_path, engine, {"compute": "fp16", "reduce": "bf16", "loss_scale": {"initial": 256.0}})
    one, other = ranks
    assert one["steps"] == other["steps"]
    overflow = [step[1] for step in one["steps"]]
    assert overflow == [False, False, True, False, False]
    assert [step[2] for step in one["steps"]] == [256.0, 256.0, 256.0, 128.0, 128.0]
    assert torch.equal(one["values"], other["values"])
    for grads in (one["grads"][1], one["grads"][4]):
        assert torch.equal(grads, grads.bfloat16().float())
    assert not torch.equal(one["grads"][4], torch.zeros(()).expand_as(one["grads"][4]))
    (event,) = record.events
    assert (event["event"], event["step"], event["before"], event["after"]) == ("loss_scale", 3, 256.0, 128.0)
    assert (record.start["precision_seen"]["reduce"], record.start["engine"]) == ("bfloat16", engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_gradients_of_bf16_parameters_can_travel_in_fp32(tmp_path: Path, engine: str) -> None:
    ranks, record = trained(tmp_path, engine, {"params": "bf16"})
    seen = record.start["precision_seen"]
    assert (seen["params"], seen["grads"], seen["reduce"]) == ("bfloat16", "bfloat16", "float32")
    assert torch.equal(ranks[0]["values"], ranks[1]["values"])
    # Whole and alike, or each its own part.
    assert torch.equal(ranks[0]["grads"][1], ranks[1]["grads"][1]) is (engine == "ddp")
    assert record.series["loss_train"].values[1] < record.series["loss_train"].values[0]
