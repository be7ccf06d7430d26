"""A rank that another launcher starts: words byte for byte, the lifeline, and how it ended."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.rank import MARK, decoded, encoded
from normscale.claims.workers import cores

from .test_command import AWKWARD
from .test_ssh_faults import is_alive

ROOT = Path(__file__).parents[2]
DRIVER = "import sys; from launch import rank; rank.ENTRY = (sys.argv[1],); sys.exit(rank.main(sys.argv[2:]))"
ODD = {"NORMSCALE_X": "a'\"$HOME `id`\n$$ é"}
DUMP = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
WAIT = """
import os, signal, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(60)
"""


def start(tmp_path: Path, body: str, words: list[str], watch: bool = True) -> subprocess.Popen[bytes]:
    script = tmp_path / "rank.py"
    script.write_text(body)
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(script), encoded(words, ODD, watch)],
        cwd=ROOT,
        env={**os.environ, "RANK": "1", "LOCAL_SIZE": "2"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def started(path: Path) -> int:
    deadline = time.monotonic() + 20
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(path.read_text())


def test_words_are_one_argument_that_no_shell_touches():
    text = encoded(AWKWARD, ODD, watch=False)
    assert decoded(text) == {"words": AWKWARD, "env": ODD, "watch": False, "parts": None}
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=")


@pytest.mark.parametrize("watch", [True, False])
def test_words_and_variables_reach_the_rank(tmp_path: Path, watch: bool):
    process = start(tmp_path, DUMP, AWKWARD, watch)
    assert process.wait(30) == 0  # with its lifeline open
    out, err = process.communicate()
    words, environ = json.loads(out)
    assert words == AWKWARD
    assert environ["NORMSCALE_X"] == ODD["NORMSCALE_X"]
    assert (environ["RANK"], environ["LOCAL_WORLD_SIZE"]) == ("1", "2")
    assert environ["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // 2)))
    assert (MARK in err) is watch


def told(err: bytes) -> dict[str, object]:
    found: dict[str, object] = json.loads(err.rpartition(MARK)[2])
    return found


def test_how_it_ended_is_told(tmp_path: Path):
    process = start(tmp_path, "import sys; sys.exit(3)", [])
    assert process.wait(30) == 3
    status = told(process.communicate()[1])
    assert (status["rank"], status["code"]) == (1, 3)


# What a full disk leaves of a status.
FULL = "import os; open(os.environ['NORMSCALE_STATUS_DIR'] + '/rank1.part', 'w')\n"


def test_a_status_that_a_full_disk_swallowed_is_not_a_failure(tmp_path: Path):
    process = start(tmp_path, FULL, [])
    assert process.wait(30) == 0
    assert told(process.communicate()[1]) == {"rank": 1, "exit_code": 0, "error": ""}
    process = start(tmp_path, FULL + "exit(3)", [])
    assert process.wait(30) == 3
    assert told(process.communicate()[1])["code"] == 3


def test_a_killed_rank_is_told_as_such(tmp_path: Path):
    process = start(tmp_path, WAIT, [str(tmp_path / "pid")])
    os.kill(started(tmp_path / "pid"), signal.SIGKILL)
    assert process.wait(30) == 137
    assert told(process.communicate()[1])["code"] == -9


def test_the_end_of_the_lifeline_is_the_end_of_the_rank(tmp_path: Path):
    process = start(tmp_path, WAIT, [str(tmp_path / "pid")])
    pid = started(tmp_path / "pid")
    assert process.stdin is not None
    process.stdin.close()
    process.wait(15)
    assert not is_alive(pid)


def test_a_rank_does_not_outlive_what_started_it(tmp_path: Path):
    process = start(tmp_path, WAIT, [str(tmp_path / "pid")])
    pid = started(tmp_path / "pid")
    process.kill()
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)
