"""What ranks say, passed on line by line, and how a host's ranks ended."""

import os
import signal
import sys
import tempfile
import threading
import time
from typing import Any

import pytest

from launch import supervise
from launch.command import Command
from launch.failures import Failure
from launch.supervise import Supervised, heed, pump


def pumped(*pieces: bytes, pause_s: float = 0.05) -> list[bytes]:
    read, write = os.pipe()
    said: list[bytes] = []
    with os.fdopen(read, "rb") as stream:
        thread = threading.Thread(target=pump, args=(stream, said.append))
        thread.start()
        for piece in pieces:
            os.write(write, piece)
            time.sleep(pause_s)
        os.close(write)
        thread.join(5)
    return said


def test_lines_are_passed_on_whole():
    assert pumped(b"a", b"b\nc", b"\nd") == [b"ab\n", b"c\n", b"d"]
    assert pumped(b"step 1\r", b"step", b" 2\r") == [b"step 1\r", b"step 2\r"]


def test_what_stays_unfinished_is_passed_on_after_a_while(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervise, "PARTIAL_S", 0.1)
    assert pumped(b"sure? ", b"yes\n", pause_s=0.4) == [b"sure? ", b"yes\n"]


def test_a_line_may_get_long_but_not_endless(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervise, "LONGEST", 4)
    assert b"".join(pumped(b"12345", b"6", b"789")) == b"123456789"
    assert len(pumped(b"12345", b"6", b"789")) > 1


def ended(code: str, **kinds: Any) -> tuple[supervise.Outcome, bytes, bytes]:
    out, err = [], []
    command = Command((sys.executable, "-c", code))
    ranks = Supervised(command, err.append, out.append, **kinds)
    deadline = time.monotonic() + 20
    while not ranks.poll():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return ranks.finish(1.0), b"".join(out), b"".join(err)


def test_output_and_exit_code():
    code = "import sys; print('o'); print('e', file=sys.stderr); print(sys.stdin.read())"
    outcome, out, err = ended(code, ranks=False)
    assert (outcome.exit_code, outcome.failure, out, err) == (0, None, b"o\n\n", b"e\n")


def test_exit_code_0_of_ranks_counts_only_with_their_word():
    outcome, _, _ = ended("")
    assert outcome.failure is not None
    assert (outcome.exit_code, outcome.failure.error) == (1, "ended without a word")


def test_a_status_that_a_full_disk_swallowed_is_not_a_failure():
    outcome, _, err = ended("import os; open(os.environ['NORMSCALE_STATUS_DIR'] + '/rank0.part', 'w')")
    assert (outcome.exit_code, outcome.failure) == (0, None)
    says = "ranks could not leave word of their end there (no space was left); their exit code was 0"
    assert err == f"normscale: {tempfile.gettempdir()}: {says}; free some space, or set TMPDIR\n".encode()


def test_a_rank_that_says_nothing_has_its_number_from_its_environment():
    """Where the hosts number themselves only as they meet, the first rank of this one may be any."""
    rank = "import time; time.sleep(1.5)"
    line = "E1129 16:22:31.176000 7179 x/torch/distributed/elastic/multiprocessing/api.py:1002]"
    code = f"""
import os, subprocess, sys
own = [{{"RANK": str(4 + local), "LOCAL_RANK": str(local)}} for local in (0, 1)]
ranks = [subprocess.Popen([sys.executable, "-c", {rank!r}], env=env) for env in own]
[rank.wait() for rank in ranks]
print("{line} failed (exitcode: 3) local_rank: 1 (pid: 7) of binary: p", file=sys.stderr)
sys.exit(1)
"""
    assert ended(code, first_rank=None)[0].failure == Failure(5, 3, "ended with exit code 3")


def test_a_line_without_end_is_passed_on_in_pieces():
    _, _, err = ended("import sys; sys.stderr.write('y' * 1_000_000)", ranks=False)
    assert err == b"y" * 1_000_000


@pytest.mark.parametrize(("ranks", "has"), [(True, b"True\n"), (False, b"False\n")])
def test_only_ranks_leave_a_status(ranks: bool, has: bytes):
    code = "import os, sys; print('NORMSCALE_STATUS_DIR' in os.environ); sys.exit(5)"
    outcome, out, _ = ended(code, ranks=ranks)
    assert (outcome.exit_code, out) == (5, has)


def test_usr1_does_not_end_what_starts_ranks():
    outcome, out, _ = ended("import os; os.kill(os.getpid(), 10); print('alive')", ranks=False)
    assert (outcome.exit_code, out) == (0, b"alive\n")


def test_signals_that_are_ignored_stay_so_but_those_that_schedulers_send(monkeypatch: pytest.MonkeyPatch):
    ignored = dict.fromkeys((signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM), signal.SIG_IGN)  # a batch script's
    heeded: list[int] = []
    monkeypatch.setattr(signal, "getsignal", lambda number: ignored.get(number, signal.SIG_DFL))
    monkeypatch.setattr(signal, "signal", lambda number, handler: heeded.append(number))
    heed(lambda *_: None)
    assert heeded == [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


def test_what_a_rank_left_running_is_ended():
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    _, out, _ = ended(code)
    with pytest.raises(ProcessLookupError):
        os.kill(int(out), 0)
