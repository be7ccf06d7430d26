"""Which engine a run gets on how many ranks, and what is refused before anything is built."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normscale.cli import main
from normscale.config.schema import RunConfig
from normscale.errors import ConfigError, LaunchError
from normscale.models.builder import build
from normscale.tracking.reader import read_run
from normscale.train.engines import ranks
from normscale.train.engines.make import check_engine, make_engine
from normscale.train.engines.plain import PlainEngine

ROOT = Path(__file__).parents[2]
MODEL = {"M": 1, "d": 8, "heads": 1, "context": 8}


def config(name: str = "auto", **more: object) -> RunConfig:
    return RunConfig.model_validate({"model": MODEL, "engine": {"name": name}, **more})


def on_ranks(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    variables = {"WORLD_SIZE": world, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29_499}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_auto_is_plain_on_one_rank_and_ddp_on_several() -> None:
    engine = config().engine
    assert [engine.on(world) for world in (1, 2, 64)] == ["plain", "ddp", "ddp"]
    assert [config(name).engine.on(1) for name in ("ddp", "fsdp2", "deepspeed")] == ["ddp", "fsdp2", "deepspeed"]
    made = make_engine(build(config().model, 32, 0), config())
    assert (type(made), made.name, made.world) == (PlainEngine, "plain", 1)


def test_plain_on_several_ranks_is_refused_and_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    on_ranks(monkeypatch, 2)
    with pytest.raises(
        ConfigError, match=r"engine\.name: plain is for one process, and 2 were started; set it to auto"
    ):
        check_engine(config("plain"))
    check_engine(config("fsdp2"))


def test_fsdp2_keeps_no_narrow_copy_of_every_weight_at_once() -> None:
    narrow = config("fsdp2", precision={"compute": "bf16"})
    try:
        with make_engine(build(narrow.model, 32, 0), narrow).autocast():
            assert torch.is_autocast_enabled("cpu")
            assert not torch.is_autocast_cache_enabled()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_a_group_of_another_size_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one process has joined a group alone, and was started as one of two."""
    ranks.join(30)
    try:
        on_ranks(monkeypatch, 2)
        with pytest.raises(LaunchError, match=r"WORLD_SIZE=2 was asked for, but the process group has 1 rank\(s\)"):
            make_engine(build(config().model, 32, 0), config(name))
    finally:
        torch.distributed.destroy_process_group()


def test_the_timeout_is_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.join(17.0)
    try:
        group = torch.distributed.distributed_c10d._get_default_group()
        assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 17.0
    finally:
        torch.distributed.destroy_process_group()


def test_a_pass_beside_training_sees_the_weights_as_they_are_by_then() -> None:
    """FSDP2 keeps what it has gathered around the blocks until a backward, which such a pass has none of."""
    ranks.join(30)
    try:
        engines = [make_engine(build(config().model, 32, 0), config(name)) for name in ("plain", "fsdp2")]
        tokens, seen = torch.arange(16).view(2, 8), []
        for engine in engines:
            assert isinstance(engine, PlainEngine)
            for _ in range(2):
                with engine.aside() as quiet:
                    seen.append((quiet(tokens), quiet.features(tokens)))
                with torch.no_grad():
                    engine.flat.values.mul_(1.5)
        for plain, sharded in zip(seen[:2], seen[2:], strict=True):
            assert torch.equal(plain[0], sharded[0])
            assert torch.equal(plain[1], sharded[1])
        assert not torch.equal(seen[0][0], seen[1][0])
    finally:
        torch.distributed.destroy_process_group()


def test_fsdp2_waits_in_the_group_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU beside a GPU, PyTorch would make a mesh a group of its own, which waits for half an hour."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    ranks.join(17.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    try:
        make_engine(build(config().model, 32, 0), config("fsdp2"))
        assert len(torch.distributed.distributed_c10d._world.pg_map) == 1
    finally:
        torch.distributed.destroy_process_group()


def test_fsdp2_sums_micro_batches_in_the_dtype_of_gradients_and_sends_in_that_of_reduce() -> None:
    sent = config("fsdp2", precision={"reduce": "bf16"})
    tokens = torch.randint(32, (6, 2, 8), generator=torch.Generator().manual_seed(0))
    found = {}
    try:
        for name in ("plain", "fsdp2"):
            engine = make_engine(build(config().model, 32, 0), sent if name == "fsdp2" else config())
            engine.zero_grad()
            for i, each in enumerate(tokens):
                with engine.micro_batch(last=i == len(tokens) - 1):
                    engine.backward(engine.model(each).square().mean())
            engine.check()
            found[name] = engine.gradients()
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(found["fsdp2"], found["plain"].bfloat16().float())
    assert not torch.equal(found["fsdp2"], found["plain"])


@pytest.mark.slow
def test_a_rank_that_does_not_come_ends_the_other_within_the_timeout() -> None:
    code = (
        "import torch, torch.distributed as dist\n"
        "from normscale.train.engines.ranks import join\n"
        "rank, _ = join(2.0)\n"
        "if rank == 0: dist.all_reduce(torch.zeros(1))\n"
        "else: __import__('time').sleep(20)\n"
    )
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
    shared |= {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        error = started[0].communicate(timeout=60)[1]
        assert started[0].returncode != 0
        assert "imed out" in error
        assert started[1].poll() is None  # it was not the other's end that ended it
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_one_process_trains_with_fsdp2_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model.M=2", "model.d=16", "model.heads=2", "data.max_bytes=40_000", "train.steps=4", "train.batch=4"]
    words += ["train.eval_batches=1", "tracking.uri=null", f"tracking.runs={tmp_path}", "probes.every=2"]
    words += ["model.checkpointing=true", "checkpoint.every=2", "probes.layers=true", "probes.epsilon.every=2"]
    for engine in ("plain", "fsdp2"):
        assert main(["train", str(ROOT / "configs/train/quick.yaml"), *words, f"engine.name={engine}"]) == 0
    capsys.readouterr()
    records = {record.start["engine"]: record for record in map(read_run, tmp_path.glob("deepnorm-*"))}
    plain, sharded = records["plain"], records["fsdp2"]
    assert plain.series.keys() == sharded.series.keys()
    assert plain.profiles.keys() == sharded.profiles.keys()
    assert not sharded.events
    for name in plain.series.keys() - {"tokens_s"}:
        assert sharded.series[name].values == pytest.approx(plain.series[name].values, rel=1e-3, abs=1e-5), name
    assert sharded.start["model"]["params"] == plain.start["model"]["params"]
    (folder,) = tmp_path.glob(f"{sharded.run_id}*")
    assert main(["removal", str(folder)]) == 0  # from a sharded checkpoint
    assert "decoder.0001" in capsys.readouterr().out
