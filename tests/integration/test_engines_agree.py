"""Every engine on one process and on two, in fp32: the same gradients, losses, profiles and weights."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from normscale.probes.culprit import Culprit
from tests.integration.ranks import ROOT, run_two

pytestmark = pytest.mark.slow

ONE = ("plain", "ddp", "fsdp2")
TWO = ("ddp", "fsdp2")
CLASSES = {"plain": "PlainEngine", "ddp": "DDPEngine", "fsdp2": "FSDP2Engine", "deepspeed": "ZeroEngine"}
TOLERANCES = {"sgd": 1e-5, "adam": 1e-3}

Seen = dict[tuple[str, str], Any]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    out = tmp_path_factory.mktemp("one")
    quiet = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    words = [sys.executable, "-m", "tests.integration.engines_worker", str(out), *ONE]
    env = quiet | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return torch.load(out / "rank0.pt")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    out = tmp_path_factory.mktemp("two")
    run_two("engines_worker", str(out), *TWO, timeout=200)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize("engine", ONE[1:])
def test_one_process_agrees_with_plain(engine: str, kind: str, one: Seen) -> None:
    compare(one[engine, kind], one["plain", kind], engine, kind, world=1)


@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize("engine", TWO)
def test_two_processes_agree_with_one(engine: str, kind: str, one: Seen, two: list[Seen]) -> None:
    first, second = (seen[engine, kind] for seen in two)
    assert torch.equal(first["losses"], second["losses"])
    assert torch.equal(first["norms"], second["norms"])
    assert first["digest"] == second["digest"]
    compare(first, one["plain", kind], engine, kind, world=2)


def compare(got: Any, plain: Any, engine: str, kind: str, world: int) -> None:
    assert (got["class"], got["world"]) == (CLASSES[engine.partition(":")[0]], world)
    assert got["gradients"].keys() == plain["gradients"].keys() == got["values"].keys()
    for name, gradient in plain["gradients"].items():
        apart = (got["gradients"][name] - gradient).norm() / gradient.norm()
        assert apart <= 1e-5, name
    assert not got["events"]
    assert got["kept"]  # what is written to whole weights reaches each rank's part
    assert got["changed"] > 0.5
    tolerance = TOLERANCES[kind]
    torch.testing.assert_close(got["norms"][0], plain["norms"][0], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(got["losses"], plain["losses"], rtol=tolerance, atol=0.0)
    torch.testing.assert_close(got["held_out"], plain["held_out"], rtol=tolerance, atol=0.0)
    torch.testing.assert_close(got["update"], plain["update"], rtol=30 * tolerance, atol=0.0)
    for name, value in plain["values"].items():
        assert (got["values"][name] - value).norm() <= 30 * tolerance * value.norm() + 1e-6, name
    assert plain["losses"][-1] < plain["losses"][0] - (0.5 if kind == "adam" else 0.05)  # a model that trains
    assert got["profiles"].keys() <= plain["profiles"].keys()
    for key in got["profiles"]:
        if key.startswith("1 "):  # later ones have drifted apart
            torch.testing.assert_close(got["profiles"][key], plain["profiles"][key], rtol=2e-4, atol=1e-7, msg=key)
    assert {"1 grad_norm", "1 update_rel", "1 stream_rms"} <= got["profiles"].keys()


@pytest.mark.parametrize("engine", TWO)
def test_a_nan_on_one_rank_is_named_and_its_step_never_was(engine: str, two: list[Seen]) -> None:
    first, second = (seen[engine, "faulty"] for seen in two)
    assert repr(first) == repr(second)  # NaN is NaN
    assert first["applied"] == [True, True, False, True, True, True, True]
    assert first["stops"] == [False] * 5 + [True, False]
    digests = first["digests"]
    assert digests[1] == digests[2] != digests[3]
    assert digests[-1] == first["without"]
    (event,) = first["events"]
    culprit = Culprit.from_fields(event["culprit"])
    assert (culprit.rank, culprit.micro_batch, culprit.phase) == (1, 0, "forward")
    assert (culprit.module, culprit.type, culprit.tensor) == (
        "blocks.1.sublayers.ffn.branch",
        "FeedForward",
        "output",
    )
    assert culprit.reproduced
    assert event["layer"] == 3
