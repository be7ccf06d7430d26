"""The call of DeepSpeed's launcher, as text, and what may be seen of it."""

import base64
import shlex
import sys
from pathlib import Path

import pytest

from launch.__main__ import main
from launch.deepspeed import SSH_ARGS, command
from launch.hostfile import Host
from launch.pdsh_job import _NOISE
from launch.rank import decoded

from .test_main import QUICK

HOSTS = [Host("n0", 1), Host("n1", 2)]


def test_the_command():
    text = command(Path("my hosts"), HOSTS, ("n0", 4567), "WORDS").shell()
    assert text == (
        f"DS_ENV_FILE=/dev/null PDSH_SSH_ARGS_APPEND='{SSH_ARGS}' {shlex.quote(sys.executable)} "
        "-m deepspeed.launcher.runner --hostfile 'my hosts' --include n0@n1 --master_addr n0 --master_port 4567 "
        "--force_multi --no_ssh_check --no_local_rank --launcher_args=-N --module launch.rank WORDS"
    )


def test_deepspeed_reads_it_as_meant(tmp_path: Path):
    runner = pytest.importorskip("deepspeed.launcher.runner")
    (tmp_path / "hosts").write_text("n0 slots=1 # first\r\n\nn1   slots=2\nn2 slots=9\n")
    words = command(tmp_path / "hosts", HOSTS, ("n0", 4567), "WORDS").argv
    read = runner.parse_args(list(words[3:]))
    pool = runner.fetch_hostfile(read.hostfile)
    assert dict(runner.parse_inclusion_exclusion(pool, read.include, read.exclude)) == {"n0": [0], "n1": [0, 1]}
    assert (read.user_script, read.user_args, read.module, read.no_local_rank) == ("launch.rank", ["WORDS"], True, True)


def test_a_dry_run_shows_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "hosts").write_text("n0 slots=1\nn1 slots=1\n")
    for name, value in {"MLFLOW_TRACKING_PASSWORD": "hush", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "1"}.items():
        monkeypatch.setenv(name, value)
    words = ["deepspeed", "--hostfile", str(tmp_path / "hosts"), "--port", "4567", "--device", "cpu", "--dry-run"]
    assert main([*words, "--", QUICK, "name=a b"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    job = decoded(shlex.split(line)[-1])
    assert (job["words"], job["watch"]) == ([QUICK, "name=a b"], False)
    assert (job["env"]["NCCL_DEBUG"], job["env"]["ACCELERATE_USE_CPU"]) == ("INFO", "true")
    assert "CUDA_VISIBLE_DEVICES" not in job["env"]
    assert "hush" not in line
    assert b"hush" not in base64.urlsafe_b64decode(shlex.split(line)[-1])
    assert "--master_port 4567" in line


def test_without_pdsh_a_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "hosts").write_text("n0 slots=1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["deepspeed", "--hostfile", str(tmp_path / "hosts"), "--", QUICK]) == 2
    assert capsys.readouterr().err == (
        "normscale: pdsh: no such program here; apt-get install pdsh, or use launch ssh, which needs none\n"
    )


@pytest.mark.parametrize(
    ("line", "noise"),
    [
        (b"[2026-11-30 11:57:23,601] [INFO] [multinode_runner.py:95:get_cmd] Running on node0\n", True),
        (b"[2026-11-30 11:57:23,601] [INFO] [launch.py:163:main] dist_world_size=2\n", True),
        (b"[2026-11-30 11:57:23,601] [WARNING] [real_accelerator.py:1:x] Setting accelerator to CPU.\n", True),
        (b"pdsh@node0: node1: ssh exited with exit code 3\n", True),
        (b"step 1/20  loss 5.022\n", False),
        (b"normscale: rank 1: bad\n", False),
        (b"[2026-11-30 11:57:23,601] [INFO] [engine.py:1:x] of DeepSpeed in a rank\n", False),
    ],
)
def test_what_the_launcher_says_of_itself_is_parted_from_the_ranks(line: bytes, noise: bool):
    assert bool(_NOISE.match(line)) is noise
