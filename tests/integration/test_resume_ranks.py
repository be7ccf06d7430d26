"""Two ranks that are interrupted go on from one checkpoint, each with its own random state."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from normscale.tracking.reader import read_run
from tests.integration.ranks import run_two


@pytest.mark.slow
def test_both_ranks_go_on_from_the_newest_that_both_can_use(tmp_path: Path) -> None:
    errors = run_two("resume_worker", str(tmp_path))
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
    assert [event["event"] for event in record.events] == ["checkpoint_passed_over"]

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
    assert second.keys() == {"own/cpu"} < first.keys()  # what ranks share is written once
    assert not torch.equal(first["own/cpu"], second["own/cpu"])
