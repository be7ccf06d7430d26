"""Batch norm on two ranks is that of one process with all tokens, and remembers the same on both."""

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from normscale.config.schema import RunConfig
from normscale.errors import ConfigError
from normscale.probes.culprit import Culprit
from normscale.train.engines import make
from tests.integration.ranks import ROOT, run_two

TWO = ("ddp", "fsdp2")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("one")
    words = [sys.executable, "-m", "tests.integration.batchnorm_worker", str(out), "plain"]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return torch.load(out / "rank0.pt")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    out = tmp_path_factory.mktemp("two")
    run_two("batchnorm_worker", str(out), *TWO, timeout=300)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("engine", TWO)
def test_two_ranks_remember_alike_and_synchronised_they_are_one(engine: str, sync: bool, one: Any, two: Any) -> None:
    first, second = (found[engine, sync] for found in two)
    for a, b, whole in zip(first["running"], second["running"], one["plain", sync]["running"], strict=True):
        assert a.keys() == b.keys() == whole.keys() != set()
        for name, value in a.items():
            assert torch.equal(value, b[name]), name
            assert torch.isfinite(value).all(), name
            if sync:
                torch.testing.assert_close(value, whole[name], rtol=1e-3, atol=1e-4, msg=name)
    losses, alone = first["losses"], one["plain", sync]["losses"]
    assert [math.isfinite(loss) for loss in losses] == [True, True, False, True]
    if sync:
        assert [losses[i] for i in (0, 1, 3)] == pytest.approx([alone[i] for i in (0, 1, 3)], rel=1e-4)
        assert first["held_out"] == pytest.approx(one["plain", sync]["held_out"], rel=1e-3)
    else:
        assert abs(losses[0] / alone[0] - 1) > 1e-4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", TWO)
def test_a_step_that_is_not_applied_leaves_no_trace_and_its_culprit_is_found(engine: str, two: Any) -> None:
    for sync in (True, False):
        first, second = (found[engine, sync] for found in two)
        before, after = (first["running"][step] for step in (1, 2))
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert repr(first["events"]) == repr(second["events"])
        (event,) = first["events"]
        assert Culprit.from_fields(event["culprit"]).rank == 1
        assert event["culprit"]["module"] == "blocks.1.sublayers.ffn.branch"


@pytest.mark.parametrize(
    ("options", "world", "says"),
    [
        ({"engine": {"name": "deepspeed"}}, 1, "keeps running statistics, which ZeRO's checkpoints do not hold"),
        ({"model": {"compile": True}}, 2, "asks the other ranks within a block, which cannot be compiled"),
    ],
)
def test_what_would_lose_its_statistics_is_refused(
    options: Any, world: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "world_size", lambda: world)
    for norms in ({"norm": "batchnorm"}, {"norms": {"ffn": "batchnorm"}}):
        config = RunConfig(**options | {"model": {"M": 1, **norms, **options.get("model", {})}})
        with pytest.raises(ConfigError, match=says):
            make.check_engine(config)
    make.check_engine(RunConfig(model={"M": 1, "norm": "batchnorm"}))
