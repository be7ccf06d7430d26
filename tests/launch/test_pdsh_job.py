"""A launch through pdsh, with a stand-in for DeepSpeed's launcher: whose failure counts, and how signals get there."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.rank import MARK

from .test_ssh_faults import is_alive

ROOT = Path(__file__).parents[2]
DRIVER = """
import sys
from launch.command import Command
from launch.hostfile import Host
from launch.job import Limits
from launch.pdsh_job import PdshJob
from launch.ssh import Place
hosts = [Host("alpha", 1), Host("beta", 2)]
limits = Limits(grace_s=float(sys.argv[2]), after_failure_s=0.5)
sys.exit(PdshJob(Command((sys.executable, "-c", sys.argv[1])), hosts, Place(), limits).run())
"""
RUNNER = f"""
import json, os, signal, subprocess, sys, time
def tell(**status):
    os.write(2, {MARK!r} + json.dumps(status).encode() + b"\\n")
"""
RANK = "import signal, time; signal.signal(15, lambda *_: exit(143)); print('up', flush=True); time.sleep(60)"
WAITING = f"""
rank = subprocess.Popen([sys.executable, "-c", {RANK!r}], stdout=subprocess.PIPE)
rank.stdout.readline()
tell(rank=2, pid=rank.pid)
print(rank.pid, flush=True)
code = rank.wait()
tell(rank=2, exit_code=code, error="stopped with a checkpoint", t=5) if code == 143 else tell(rank=2, code=code)
sys.exit(1)
"""


def start(body: str, grace_s: float = 5.0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, RUNNER + body, str(grace_s)],
        cwd=ROOT,
        env={**os.environ, "MLFLOW_TRACKING_PASSWORD": "hush"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_what_ranks_say_passes_and_what_the_launcher_says_does_not():
    body = """
print("[2026-11-30 11:57:23,601] [INFO] [launch.py:1:main] nnodes=2")
print("step 1/20")
print("pdsh@node0: beta: ssh exited with exit code 3", file=sys.stderr)
print("a warning", file=sys.stderr)
for rank in range(3): tell(rank=rank, exit_code=0, error="", t=5)
"""
    assert finish(start(body)) == (0, "step 1/20\n", "a warning\n")


def test_exit_code_0_counts_only_with_the_word_of_every_rank():
    body = "tell(rank=0, exit_code=0, error='', t=5)\ntell(rank=2, exit_code=0, error='', t=5)"
    code, _, err = finish(start(f"{body}\nsys.stderr.write('{MARK.decode()}half of a wo\\n')"))
    assert (code, err) == (1, "normscale: rank 1 on beta ended without a word; the other ranks were stopped\n")


def test_the_first_failing_rank_answers():
    body = (
        "tell(rank=2, exit_code=3, error='loss is NaN', t=5)\ntell(rank=0, exit_code=1, error='bad', t=9)\nsys.exit(1)"
    )
    assert finish(start(body)) == (3, "", "normscale: rank 2 on beta: loss is NaN\n")


def test_a_rank_that_had_to_be_killed_after_a_failure_is_not_the_reason():
    body = "tell(rank=1, code=3)\ntell(rank=0, code=-9)\nsys.exit(1)"
    code, _, err = finish(start(body))
    assert (code, err) == (3, "normscale: rank 1 on beta ended with exit code 3; the other ranks were stopped\n")


def test_a_killed_rank_is_named():
    code, _, err = finish(start("tell(rank=1, code=-9)\ntime.sleep(60)"))
    assert (code, err) == (
        1,
        "normscale: rank 1 on beta was killed by SIGKILL (out of memory?); the other ranks were stopped\n",
    )


def test_a_lost_host_is_named():
    body = "print('pdsh@node0: beta: ssh exited with exit code 255', file=sys.stderr)\nsys.exit(255)"
    code, _, err = finish(start(body))
    assert (code, err) == (1, "normscale: beta: the connection was lost; the ranks of the other hosts were stopped\n")


def test_a_launcher_that_fails_itself_has_its_words_kept():
    body = "print('pdsh@node0: no such thing', file=sys.stderr)\nsys.exit(7)"
    code, _, err = finish(start(body))
    assert code == 1
    assert err == "pdsh@node0: no such thing\nnormscale: DeepSpeed's launcher failed with exit code 7\n"


@pytest.mark.usefixtures("hosts_here")
def test_a_signal_reaches_the_ranks():
    process = start(WAITING)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.terminate()
    code, _, err = finish(process)
    assert (code, err) == (143, "normscale: stopped by SIGTERM\n")
    assert not is_alive(pid)


@pytest.mark.usefixtures("hosts_here")
def test_a_rank_that_does_not_end_is_killed():
    process = start(WAITING.replace("exit(143)", "0"), grace_s=0.5)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143
    assert time.monotonic() - began < 15
    assert not is_alive(pid)


def test_the_launcher_sees_no_secret_and_finds_our_pdsh():
    body = "print(json.dumps([os.environ.get('MLFLOW_TRACKING_PASSWORD'), os.environ['PATH'].split(':')[0]]))"
    _, out, _ = finish(start(body))
    password, first = json.loads(out)
    assert password is None
    assert Path(first).name.startswith("normscale-pdsh-")
    assert not Path(first).exists()


def test_a_launcher_killed_outright_takes_deepspeed_s_along():
    process = start("print(os.getpid(), flush=True)\ntime.sleep(60)")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=20)
    deadline = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(pid)
