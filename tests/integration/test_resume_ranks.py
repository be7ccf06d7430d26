"""Two ranks that are interrupted go on from one checkpoint, each with its own random state."""

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from normscale.config.schema import RunConfig
from normscale.models.builder import build
from normscale.tracking.reader import read_run
from normscale.train.trained import weights_of
from tests.integration.ranks import run_two

DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra 'deepspeed'")


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    ["ddp", "fsdp2", pytest.param("deepspeed:3", marks=DEEPSPEED)],
)
def test_both_ranks_go_on_from_the_newest_that_both_can_use(tmp_path: Path, engine: str) -> None:
    errors = run_two("resume_worker", str(tmp_path), engine)
    (one,), (other,) = ((tmp_path / name).iterdir() for name in ("whole", "parted"))
    assert one.name == other.name

    spoilt = other / "checkpoints" / "step-00000006"
    assert f"{spoilt}: passed over: another rank cannot use it" in errors[0]
    assert "passed over" not in errors[1]
    record, expected = read_run(other), read_run(one)
    assert (record.attempt, record.start["from_step"]) == (2, 4)
    for name in expected.series.keys() - {"tokens_s"}:
        assert record.series[name].steps == expected.series[name].steps
        np.testing.assert_array_equal(record.series[name].values, expected.series[name].values, err_msg=name)
    assert [event["event"] for event in record.events] == ["resumed", "checkpoint_passed_over"]

    ends = [run / "checkpoints" / "step-00000008" for run in (one, other)]
    assert sorted(path.name for path in ends[0].iterdir()) == [
        "complete",
        "index.json",
        "rank0.safetensors",
        "rank1.safetensors",
    ]
    loaded = [[load_file(end / f"rank{rank}.safetensors") for rank in range(2)] for end in ends]
    for tensors, others in zip(*loaded, strict=True):
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    first, second = loaded[0]
    sharded = {name for name in second if name != "own/cpu"}
    assert all("/own/" in name for name in sharded)
    assert bool(sharded) is (engine != "ddp")
    assert second.keys() == {"own/cpu"} | sharded < first.keys()  # what ranks share is written once
    # The parts are the whole weights, as other commands read them.
    whole = weights_of(other)[1]
    model = build(RunConfig.model_validate(record.start["config"]).model, 256, 0)
    assert {name: x.shape for name, x in whole.items()} == {name: x.shape for name, x in model.state_dict().items()}
    digest = hashlib.sha256()
    for name in sorted(whole):
        digest.update(name.encode() + b"\0" + whole[name].numpy().tobytes())
    assert {json.loads((other / f"rank{rank}.status").read_text())["weights"] for rank in range(2)} == {
        digest.hexdigest()
    }
    name = engine.partition(":")[0]
    assert (record.start["engine"], json.loads((ends[1] / "index.json").read_text())["engine"]) == (name, name)
    assert not torch.equal(first["own/cpu"], second["own/cpu"])
