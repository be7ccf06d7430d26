"""Two real processes: what must differ between them, what must agree, and how often they talk."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from normscale.tracking.spool import read_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "tests.integration.worker", str(out)]
    started = [
        subprocess.Popen(
            words,
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
    return out


@pytest.fixture(scope="module")
def ranks(ended: Path) -> list[dict[str, Any]]:
    return [torch.load(ended / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.slow
def test_ranks_drop_other_units_of_other_samples_and_end_with_the_same_weights(ranks: list[dict[str, Any]]) -> None:
    one, other = ranks
    assert len(one["masks"]) == len(other["masks"]) == 3 * 2
    for masks in zip(one["masks"], other["masks"], strict=True):
        assert not torch.equal(*masks)
        assert abs(float((masks[0] == masks[1]).float().mean()) - 0.5) < 0.1  # as two independent masks would
    assert not any(torch.equal(*batches) for batches in zip(one["batches"], other["batches"], strict=True))
    assert torch.equal(one["grads"], other["grads"])
    assert torch.equal(one["values"], other["values"])


@pytest.mark.slow
def test_gradients_travel_once_a_step_however_many_micro_batches(ranks: list[dict[str, Any]]) -> None:
    assert [rank["reductions"] for rank in ranks] == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.slow
def test_a_fault_on_the_second_rank_alone_is_named_by_the_first(ended: Path) -> None:
    (folder,) = (ended / "runs").glob("deepnorm-*")
    (event,) = read_run(folder).events
    assert (event["step"], event["layer"]) == (3, 3)
