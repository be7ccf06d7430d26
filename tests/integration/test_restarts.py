"""Ranks of two agents that are started again after a failure meet again, though only one agent saw a rank fail."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.processes import descendants
from normscale.tracking.reader import read_run

from .test_ranks_end_together import QUICK, ROOT, steps_of

TIMEOUT_S = 90
WORDS = ("model.M=2", "data.max_bytes=40_000", "train.steps=100", "train.batch=4", "train.eval_batches=1")
KEPT = ("probes.every=5", "checkpoint.every=5", "tracking.uri=null", f"engine.timeout_s={TIMEOUT_S}")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def rank_of(agent: int) -> int:
    """Returns the process of the rank below a launcher."""
    for pid in descendants(agent):
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"normscale" in words and any(entry.startswith(b"RANK=") for entry in environ):
            return pid
    raise AssertionError("no rank is there")


def test_ranks_meet_again_after_one_was_killed(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    words = [*("--rdzv", f"localhost:{port}", "--nnodes", "2", "--max-restarts", "2", "--device", "cpu"), "--", QUICK]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "launch", "torchrun", *words, *WORDS, *KEPT, f"tracking.runs={tmp_path}"],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        run_dir = steps_of(tmp_path, 10)
        os.kill(rank_of(started[1].pid), signal.SIGKILL)
        begun = time.monotonic()
        ends = [process.communicate(timeout=200) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], ends
    assert time.monotonic() - begun < TIMEOUT_S
    record = read_run(run_dir)
    assert (record.finished, record.attempt) == (True, 2)
    assert record.start["from_step"] >= 5
