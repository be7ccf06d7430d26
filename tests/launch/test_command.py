"""The rendered commands, as text."""

import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch.command import ACCELERATE_CONFIGS, CLAIM, check_port, choose_device, count_gpus, local, threads
from launch.environment import handed_on
from launch.torchrun import Elastic
from normscale.errors import LaunchError

AWKWARD = ["a b", "it's", '{"a": [1, 2]}', "", "--", "--cpu", "-m", "$HOME", "`id`", "k=--x", "é", "a\\nb", "*", "#"]


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ACCELERATE_CONFIGS.parent.parent)
    monkeypatch.setattr("launch.command.count_gpus", lambda environ: 0)


@pytest.mark.usefixtures("checkout")
def test_one_rank_is_started_without_a_launcher():
    rendered = local(["c.yaml", "seed=1"], environ={})
    assert rendered.shell() == f"ACCELERATE_USE_CPU=true {shlex.quote(sys.executable)} -m normscale train c.yaml seed=1"


@pytest.mark.usefixtures("checkout")
def test_two_cpu_ranks():
    rendered = local(["c.yaml", "name=a b"], nproc=2, port=29999, environ={"OMP_NUM_THREADS": "3"})
    assert rendered.shell() == (
        f"ACCELERATE_USE_CPU=true {shlex.quote(sys.executable)} -m accelerate.commands.launch"
        " --config_file configs/accelerate/cpu.yaml --multi_gpu --num_processes 2 --num_machines 1"
        " --mixed_precision no --num_cpu_threads_per_process 3 --main_process_port 29999"
        " -m normscale train c.yaml 'name=a b'"
    )


def test_gpu_ranks_are_not_told_to_use_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("launch.command.count_gpus", lambda environ: 2)
    text = local(["c.yaml"], nproc=2, environ={}).shell()
    assert "ACCELERATE_USE_CPU" not in text
    assert "configs/accelerate/cuda.yaml" in text
    assert "ACCELERATE_USE_CPU=true" in local(["c.yaml"], nproc=2, device="cpu", environ={}).shell()


@pytest.mark.usefixtures("checkout")
def test_what_another_launch_left_in_the_environment_is_dropped_and_shown():
    stray = {"RANK": "1", "WORLD_SIZE": "4", "ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "false", "HOME": "/h"}
    rendered = local(["c.yaml"], environ=stray)
    assert rendered.environ(stray) == {"HOME": "/h", "ACCELERATE_USE_CPU": "true"}
    assert rendered.shell().startswith("env -u ACCELERATE_USE_FSDP -u RANK -u WORLD_SIZE ACCELERATE_USE_CPU=true ")


@pytest.mark.usefixtures("checkout")
def test_a_shell_reads_the_rendered_line_back_to_the_same_words():
    rendered = local(AWKWARD, nproc=2, environ={})
    _, *argv = shlex.split(rendered.shell())
    assert tuple(argv) == rendered.argv
    echo = f"printf '%s\\0' {rendered.shell().partition(' -m normscale train ')[2]}"
    words = subprocess.run(["sh", "-c", echo], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    assert words == AWKWARD


def test_cores_are_shared_between_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert [threads(nproc, {}) for nproc in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert threads(4, {"OMP_NUM_THREADS": "5"}) == 5
    with pytest.raises(LaunchError, match="OMP_NUM_THREADS='all'"):
        threads(2, {"OMP_NUM_THREADS": "all"})


def test_gpus_are_counted_without_importing_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cu130")
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
    assert count_gpus({}, tmp_path) == 0


def test_ranks_for_gpus_are_held_to_them(monkeypatch: pytest.MonkeyPatch):
    """PyTorch may find no way to use the GPUs that are there, and would train on the CPU without a word."""
    monkeypatch.setattr("launch.command.count_gpus", lambda environ: 2)
    held = {"NORMSCALE_DEVICE": "cuda"}
    left = {"NORMSCALE_DEVICE": "cuda", "ACCELERATE_USE_CPU": "true"}  # of another launch
    assert local(["c.yaml"], device="cuda", environ=left).environ(left) == held
    assert local(["c.yaml"], nproc=2, environ=left).environ(left) == held
    assert local(["c.yaml"], device="cuda", environ={}, entry=CLAIM).sets == held
    assert local(["c.yaml"], environ=left).environ(left) == {}  # one rank, auto: as PyTorch finds
    assert local(["c.yaml"], device="cpu", environ=left).environ(left) == {"ACCELERATE_USE_CPU": "true"}
    assert held.items() <= Elastic("n:1", nproc=2).command(["c.yaml"], "cuda", left).environ(left).items()
    assert handed_on(held) == {}


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("launch.command.count_gpus", lambda environ: 1)
    assert choose_device("auto", 1, {}) == "cuda"
    for device in ("auto", "cuda"):
        with pytest.raises(LaunchError, match=r"offers 1 GPU.*--device cpu"):
            choose_device(device, 2, {})


@pytest.mark.parametrize("nproc", [0, -1])
def test_at_least_one_rank(nproc: int):
    with pytest.raises(LaunchError, match=f"--nproc {nproc}"):
        local(["c.yaml"], nproc=nproc, environ={})


def test_a_busy_port_is_found_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"--port {port}: address already in use"):
            check_port(port)
    check_port(port)
    with pytest.raises(LaunchError, match="from 1 to 65535"):
        check_port(70000)
