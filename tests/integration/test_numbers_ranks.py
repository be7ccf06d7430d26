"""Single trained numbers (ReZero's, DyT's, an l2 scale) on two ranks of every engine: the losses of one process."""

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.integration.numbers_worker import MODELS
from tests.integration.ranks import ROOT, run_two

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TWO = ("ddp", "fsdp2", *(("deepspeed:1", "deepspeed:3") if find_spec("deepspeed") else ()))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("one")
    words = [sys.executable, "-m", "tests.integration.numbers_worker", str(out), "plain"]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        words, cwd=ROOT, env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return torch.load(out / "rank0.pt")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    out = tmp_path_factory.mktemp("two")
    run_two("numbers_worker", str(out), *TWO, timeout=300)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", TWO)
def test_two_ranks_train_numbers_as_one_process_does(engine: str, model: str, one: Any, two: list[Any]) -> None:
    first, second = (found[engine, model] for found in two)
    assert first == second
    # From the second step on the losses hang on the numbers: without them a ReZero would stay the identity.
    assert first == pytest.approx(one["plain", model], rel=1e-5)
