"""The pdsh that DeepSpeed's launcher finds: pdsh, but mortal, and no pkill on any host."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from launch.pdsh_guard import put_guard

from .test_ssh_faults import is_alive

ROOT = Path(__file__).parents[2]
PDSH = """#!/bin/sh
echo "$@"
[ "$1" = end ] && exit 7
sleep 60 &
echo $! > {folder}/pid
wait
"""


@pytest.fixture
def guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    real = tmp_path / "real"
    real.mkdir()
    (real / "pdsh").write_text(PDSH.format(folder=tmp_path))
    (real / "pdsh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{real}:{os.environ['PATH']}")
    own = tmp_path / "own"
    own.mkdir()
    return put_guard(own) / "pdsh"


def start(guard: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [guard, *words], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def test_words_and_exit_code_pass(guard: Path):
    process = start(guard, "end", "a b", "$x")
    assert process.wait(20) == 7
    assert process.communicate()[0] == "end a b $x\n"


def test_pkill_is_left_undone(guard: Path):
    out, _ = start(guard, "-w", "n0", "pkill -f ", "python").communicate(timeout=20)
    assert out == ""


@pytest.mark.parametrize("how", ["lifeline", "term"])
def test_it_ends_with_all_connections(guard: Path, tmp_path: Path, how: str):
    process = start(guard, "run")
    path, deadline = tmp_path / "pid", time.monotonic() + 20
    while not path.exists() or not path.read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if how == "term":
        process.terminate()
    else:
        assert process.stdin is not None
        process.stdin.close()
    assert process.wait(10) == 137
    assert not is_alive(int(path.read_text()))
