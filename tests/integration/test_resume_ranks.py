"""Two ranks that are interrupted go on from one checkpoint, each with its own random state."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from normscale.tracking.spool import read_run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_both_ranks_go_on_from_the_newest_that_both_can_use(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.resume_worker", str(tmp_path)],
            cwd=ROOT,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=100)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], errors
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
