"""Faults of a launch over several hosts: bounded time, the reason in a line, nothing left anywhere."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STARTER = Path(__file__).with_name("starter.py")
DRIVER = """
import json, sys
from launch import ssh
from launch.hostfile import Host
from launch.job import Limits, Task
from normscale.arguments import run_command
given = json.loads(sys.argv[1])
hosts = [Host(name, 1, f"hosts:{line}") for line, name in enumerate(given["hosts"], 1)]
def run():
    with ssh.job(hosts, ssh.Place(), Limits(*given["limits"])) as job:
        sites = job.sites(0, "localhost")
        return job.run([Task(tuple(given["argv"]), {"RANK": str(rank)}, rank) for rank in range(len(sites))])
sys.exit(run_command(run))
"""
RANK = """
import atexit, json, os, signal, sys, time
rank, folder = int(os.environ["RANK"]), sys.argv[1]
left = []
def leave(code, error):
    left.append(code)
    status = {"rank": rank, "exit_code": code, "error": error, "t": time.time_ns()}
    path = os.environ["NORMSCALE_STATUS_DIR"] + f"/rank{rank}.status"
    open(path + ".part", "w").write(json.dumps(status))
    os.replace(path + ".part", path)
    sys.exit(code)
@atexit.register
def word():
    open(os.environ["NORMSCALE_STATUS_DIR"] + f"/rank{rank}.status", "a").write("" if left else '{"exit_code": 0}')
def save(number, frame):
    open(f"{folder}/saved{rank}", "w").write(str(number))
    leave(143, "stopped after a checkpoint")
def up():
    starter = os.getppid()
    agent = open(f"/proc/{starter}/stat").read().rpartition(")")[2].split()[1]
    open(f"{folder}/{rank}.part", "w").write(f"{os.getpid()} {starter} {agent}")
    os.replace(f"{folder}/{rank}.part", f"{folder}/{rank}.pid")
    while not all(os.path.exists(f"{folder}/{each}.pid") for each in (0, 1)):
        time.sleep(0.02)
"""
AFTER_S = 25.0  # no fault may take longer to its end


class Launched:
    """A launcher in a process of its own, and what runs for it on `alpha` and `beta`, a rank on each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids: dict[str, list[int]] = {}

    def start(
        self, body: str, *args: str, lost_after_s: float = 20.0, grace_s: float = 3.0, wait: bool = True
    ) -> "Launched":
        script = self.folder / "rank.py"
        script.write_text(f"{RANK}{body}")
        given = {
            "hosts": ["alpha", "beta"],
            "limits": [grace_s, lost_after_s, 20.0, 0.5],
            "argv": [sys.executable, str(STARTER), str(script), str(self.folder), *args],
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(given)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if wait:
            said = zip(*(self._line_of(rank) for rank in (0, 1)), strict=True)
            self.pids = dict(zip(("rank", "starter", "agent"), map(list, said), strict=True))
        return self

    def _line_of(self, rank: int) -> list[int]:
        """Returns the rank's process, its parent and that one's parent, as it wrote them itself: it may be gone."""
        path, deadline = self.folder / f"{rank}.pid", time.monotonic() + 30
        while not path.exists():
            assert time.monotonic() < deadline, f"rank {rank} did not start: {self.process.stderr}"
            time.sleep(0.02)
        return [int(pid) for pid in path.read_text().split()]

    def finish(self, wait_s: float = 0.0) -> tuple[int, str, str]:
        """Returns exit code, stdout and stderr, with nothing left of what there was."""
        began = time.monotonic()
        out, err = self.process.communicate(timeout=60)
        assert time.monotonic() - began < AFTER_S
        self.assert_gone(wait_s)
        return self.process.returncode, out, err

    def assert_gone(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left

    def _left(self) -> dict[str, list[int]]:
        return {what: alive for what, found in self.pids.items() if (alive := [pid for pid in found if is_alive(pid)])}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def launched(hosts_here: Path):
    made = Launched(hosts_here)
    yield made
    made.process.kill()
    for pid in [pid for found in made.pids.values() for pid in found]:
        if is_alive(pid):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGKILL)


WAIT = "signal.signal(signal.SIGTERM, save)\nup()\ntime.sleep(60)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nup()\ntime.sleep(60)"


def test_what_ranks_say_passes_through(launched: Launched):
    body = """
sys.stdout.write(f"{rank}: out \\u00e9\\n")
sys.stderr.write(f"{rank}: err\\n")
sys.stdout.write("no end")
"""
    code, out, err = launched.start(body, wait=False).finish()
    assert code == 0
    assert sorted(out.replace("no end", "").splitlines()) == ["0: out é", "1: out é"]
    assert out.count("no end") == 2
    assert sorted(err.splitlines()) == ["0: err", "1: err"]


def test_the_first_failing_rank_answers(launched: Launched):
    body = "up()\nleave(3, 'loss is NaN at step 7') if rank == 1 else time.sleep(60)"
    code, out, err = launched.start(body).finish()
    assert (code, out, err) == (3, "", "normscale: rank 1 on beta: loss is NaN at step 7\n")


def test_a_rank_that_only_lost_another_is_not_the_reason(launched: Launched):
    body = """
up()
if rank == 1:
    time.sleep(0.5)
    leave(1, "the disk is full")
leave(1, "lost the connection to another rank; the first rank that failed says why")
"""
    code, _, err = launched.start(body).finish()
    assert (code, err) == (1, "normscale: rank 1 on beta: the disk is full\n")


def test_a_killed_rank_is_named(launched: Launched):
    launched.start(WAIT)
    os.kill(launched.pids["rank"][1], signal.SIGKILL)
    code, _, err = launched.finish()
    assert (code, err) == (
        1,
        "normscale: rank 1 on beta was killed by SIGKILL (out of memory?); the other ranks were stopped\n",
    )


@pytest.mark.parametrize("body", [WAIT, STUBBORN], ids=["polite", "stubborn"])
def test_a_killed_agent_takes_its_host_and_the_others_along(launched: Launched, body: str):
    launched.start(body)
    os.kill(launched.pids["agent"][1], signal.SIGKILL)
    code, _, err = launched.finish(wait_s=3.0)
    assert code == 1
    assert err.startswith("normscale: beta: its agent was killed or failed (exit code 137)")
    assert err.count("\n") == 1


@pytest.mark.parametrize("body", [WAIT, STUBBORN], ids=["polite", "stubborn"])
def test_a_launcher_that_is_killed_outright_leaves_nothing_on_any_host(launched: Launched, body: str):
    launched.start(body)
    launched.process.kill()
    launched.assert_gone(wait_s=12.0)
    assert [(launched.folder / f"saved{rank}").exists() for rank in (0, 1)] == [body == WAIT] * 2


def test_a_launcher_that_says_nothing_any_more_is_gone(launched: Launched):
    launched.start(WAIT, lost_after_s=3.0)
    launched.process.send_signal(signal.SIGSTOP)
    launched.assert_gone(wait_s=12.0)
    launched.process.send_signal(signal.SIGCONT)
    code, _, err = launched.finish()
    assert code != 0
    assert err.count("\n") == 1


def test_a_frozen_host_is_lost_and_cleans_up_when_it_thaws(launched: Launched):
    launched.start(WAIT, lost_after_s=3.0)
    agent = launched.pids["agent"][1]
    beta = [agent, launched.pids["starter"][1], launched.pids["rank"][1]]
    for pid in beta:
        os.kill(pid, signal.SIGSTOP)
    out, err = launched.process.communicate(timeout=AFTER_S)
    assert (launched.process.returncode, out) == (1, "")
    assert err == "normscale: beta: no sign of life for 3 s; the ranks of the other hosts were stopped\n"
    for pid in beta:
        os.kill(pid, signal.SIGCONT)
    launched.assert_gone(wait_s=12.0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_ranks_can_save_a_checkpoint_when_the_launcher_is_told_to_stop(launched: Launched, number: int, code: int):
    body = "signal.signal(signal.SIGTERM, save)\nup()\ntime.sleep(60)"
    launched.start(body).process.send_signal(number)
    assert launched.finish() == (code, "", f"normscale: stopped by {signal.Signals(number).name}\n")
    assert [(launched.folder / f"saved{rank}").read_text() for rank in (0, 1)] == [str(int(signal.SIGTERM))] * 2


def test_what_does_not_end_within_the_grace_time_is_killed(launched: Launched):
    launched.start(STUBBORN, grace_s=1.0).process.terminate()
    assert launched.finish() == (143, "", "normscale: stopped by SIGTERM\n")


def test_a_checkpoint_that_failed_is_not_a_good_stop(launched: Launched):
    body = "signal.signal(signal.SIGTERM, lambda *_: leave(1, 'no space left'))\nup()\ntime.sleep(60)"
    launched.start(body).process.terminate()
    code, _, err = launched.finish()
    assert code == 1
    assert err in ("normscale: rank 1 on beta: no space left\n", "")  # rank 0 says it itself


def test_a_second_ctrl_c_ends_at_once(launched: Launched):
    body = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + STUBBORN
    launched.start(body, grace_s=60.0).process.send_signal(signal.SIGINT)
    time.sleep(0.7)
    launched.process.send_signal(signal.SIGINT)
    assert launched.finish() == (130, "", "normscale: stopped by SIGINT\n")


def test_usr1_reaches_the_ranks_and_ends_nothing_by_itself(launched: Launched):
    body = "signal.signal(signal.SIGUSR1, lambda *_: open(f'{folder}/told{rank}', 'w').close() or sys.exit(0))\nup()\ntime.sleep(60)"  # noqa: E501
    launched.start(body).process.send_signal(signal.SIGUSR1)
    assert launched.finish() == (0, "", "")
    assert all((launched.folder / f"told{rank}").exists() for rank in (0, 1))
