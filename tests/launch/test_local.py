"""Real ranks: what reaches them, what they answer, and that nothing is left of them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from launch.failures import Failure
from launch.noise import AgentNoise
from normscale.train.preempt import Preempted

from .test_command import AWKWARD

ROOT = Path(__file__).parents[2]
DRIVER = """
import os, sys
from launch import command, local
port = int(os.environ.get("TEST_PORT", "0")) or None
sys.exit(local.run(command.local(sys.argv[2:], nproc=2, device="cpu", entry=(sys.argv[1],), port=port), grace_s=2.0))
"""
RANK = """
import atexit, json, os, signal, subprocess, sys, time
rank, folder = os.environ["RANK"], sys.argv[1]
with open(f"{folder}/pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
seen = [os.environ["WORLD_SIZE"], os.environ["ACCELERATE_USE_CPU"], sys.argv[2:]]
open(f"{folder}/argv{rank}", "w").write(json.dumps(seen))
while len(open(f"{folder}/pids").readlines()) < 2:  # both are up before either fails
    time.sleep(0.05)
left = []
def leave(code, error):
    left.append(code)
    status = {"rank": int(rank), "exit_code": code, "error": error, "t": time.time_ns()}
    path = os.environ["NORMSCALE_STATUS_DIR"] + f"/rank{rank}.status"
    open(path + ".part", "w").write(json.dumps(status))
    os.replace(path + ".part", path)
    sys.exit(code)
@atexit.register
def word():
    open(os.environ["NORMSCALE_STATUS_DIR"] + f"/rank{rank}.status", "a").write("" if left else '{"exit_code": 0}')
"""


def start(tmp_path: Path, body: str, *args: str) -> subprocess.Popen[str]:
    script = tmp_path / "rank.py"
    script.write_text(RANK + body)
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(script), str(tmp_path), *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def pids(tmp_path: Path, count: int = 2) -> list[int]:
    """Returns the ranks' process ids once all have started."""
    path, deadline = tmp_path / "pids", time.monotonic() + 30
    while not path.exists() or len(path.read_text().split()) < count:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    return [int(word) for word in path.read_text().split()]


def assert_gone(found: list[int]) -> None:
    alive = [
        pid for pid in found if Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
    ]
    assert not alive


def test_every_rank_gets_the_same_words(tmp_path: Path):
    code, _, err = finish(start(tmp_path, "print('on stderr', file=sys.stderr)", *AWKWARD))
    assert code == 0
    for rank in (0, 1):
        assert json.loads((tmp_path / f"argv{rank}").read_text()) == ["2", "true", AWKWARD]
    assert err.splitlines() == ["on stderr"] * 2


@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "free"])
def test_ranks_meet_at_the_port_that_was_asked_for_or_a_free_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
):
    with socket.socket() as torch_s_default, socket.socket() as probe:
        with suppress(OSError):  # another test holds it, which is as good
            torch_s_default.bind(("", 29500))
            torch_s_default.listen()
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        if asked:
            monkeypatch.setenv("TEST_PORT", port)
        body = "open(f'{folder}/port{rank}', 'w').write(os.environ['MASTER_PORT'])"
        code, _, err = finish(start(tmp_path, body))
    assert (code, err) == (0, "")
    ports = {(tmp_path / f"port{rank}").read_text() for rank in (0, 1)}
    assert ports == {port} if asked else (len(ports) == 1 and not ports & {port, "29500"})


def test_ranks_that_end_without_a_word_have_not_trained(tmp_path: Path):
    code, _, err = finish(start(tmp_path, "os._exit(0)"))
    assert (code, err) == (1, "normscale: rank 0 ended without a word; the other ranks were stopped\n")


def test_a_program_that_does_not_even_parse_is_a_failure(tmp_path: Path):
    code, _, err = finish(start(tmp_path, "def ("))
    assert code == 1
    assert "SyntaxError" in err
    assert err.endswith("ended with exit code 1; the other ranks were stopped\n")


def test_usr1_reaches_the_ranks_and_ends_nothing_by_itself(tmp_path: Path):
    body = """
signal.signal(signal.SIGUSR1, lambda *_: open(f'{folder}/told{rank}', 'w').close())
open(f'{folder}/ready{rank}', 'w').close()
while not os.path.exists(f'{folder}/told{rank}'):
    time.sleep(0.05)
"""
    process, deadline = start(tmp_path, body), time.monotonic() + 60
    while len(list(tmp_path.glob("ready*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert finish(process) == (0, "", "")


def test_the_first_failing_rank_answers_and_its_line_is_the_only_one(tmp_path: Path):
    process = start(tmp_path, "leave(3, 'loss is NaN at step 7') if rank == '1' else time.sleep(60)")
    code, out, err = finish(process)
    assert (code, out, err) == (3, "", "normscale: rank 1: loss is NaN at step 7\n")
    assert_gone(pids(tmp_path))


def test_rank_0_has_said_its_line_itself(tmp_path: Path):
    body = "print('normscale: bad', file=sys.stderr)\nleave(2, 'bad')"
    code, _, err = finish(
        start(tmp_path, f"if rank == '0':\n    {body.replace(chr(10), chr(10) + '    ')}\ntime.sleep(60)")
    )
    assert (code, err) == (2, "normscale: bad\n")


def test_a_rank_that_failed_but_does_not_end_is_ended(tmp_path: Path):
    body = """
if rank == '1':
    try:
        leave(4, 'cannot close the files')
    finally:
        time.sleep(60)
time.sleep(60)
"""
    began = time.monotonic()
    code, _, err = finish(start(tmp_path, body))
    assert (code, err) == (4, "normscale: rank 1: cannot close the files\n")
    assert time.monotonic() - began < 50
    assert_gone(pids(tmp_path))


def test_a_killed_rank_is_named(tmp_path: Path):
    code, _, err = finish(start(tmp_path, "os.kill(os.getpid(), 9) if rank == '1' else time.sleep(60)"))
    assert (code, err) == (
        1,
        "normscale: rank 1 was killed by SIGKILL (out of memory?); the other ranks were stopped\n",
    )


@pytest.mark.parametrize("wait", [0.0, 1.5], ids=["at once", "later"])
def test_a_killed_rank_is_the_reason_whatever_the_others_say_then(tmp_path: Path, wait: float):
    body = f"""
if rank == '1':
    time.sleep(0.5)
    os.kill(os.getpid(), 9)
other = next(word for word in open(f"{{folder}}/pids").read().split() if int(word) != os.getpid())
while os.path.exists(f"/proc/{{other}}") and " Z " not in open(f"/proc/{{other}}/stat").read():
    time.sleep(0.01)
signal.signal(signal.SIGTERM, lambda *_: leave(143, 'stopped by SIGTERM'))
time.sleep({wait})
leave(1, 'lost the connection to another rank')
"""
    code, _, err = finish(start(tmp_path, body))
    assert (code, err) == (
        1,
        "normscale: rank 1 was killed by SIGKILL (out of memory?); the other ranks were stopped\n",
    )


def test_a_traceback_of_a_rank_is_kept(tmp_path: Path):
    code, _, err = finish(start(tmp_path, "if rank == '1':\n    raise ValueError('of the rank')\ntime.sleep(60)"))
    assert code == 1
    assert err.count("Traceback") == 1
    assert "ValueError: of the rank" in err
    assert err.endswith("normscale: rank 1 ended with exit code 1; the other ranks were stopped\n")


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", deaf])
with open(f"{folder}/pids", "a") as file:
    file.write(f"{child.pid}\\n")
time.sleep(60)
"""


@pytest.mark.parametrize("body", ["time.sleep(60)", STUBBORN], ids=["polite", "stubborn"])
def test_a_terminated_launcher_leaves_nothing(tmp_path: Path, body: str):
    process = start(tmp_path, body)
    ranks = pids(tmp_path, 4 if body == STUBBORN else 2)
    time.sleep(0.3)
    process.terminate()
    code, _, err = finish(process)
    assert (code, err) == (143, "normscale: stopped by SIGTERM\n")
    assert_gone(ranks)


def test_ctrl_c_lets_the_ranks_write_a_checkpoint(tmp_path: Path):
    body = f"signal.signal(15, lambda *_: (open('{tmp_path}/int' + rank, 'w').close(), sys.exit(1)))\ntime.sleep(60)"
    process = start(tmp_path, body)
    ranks = pids(tmp_path)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert_gone(ranks)
    assert sorted(path.name for path in tmp_path.glob("int*")) == ["int0", "int1"]


def test_nohup_keeps_ranks_from_the_end_of_a_terminal(tmp_path: Path):
    """And what a shell has started with `&` is not told of Ctrl-C."""
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    (tmp_path / "rank.py").write_text(RANK + "time.sleep(60)")
    words = f"trap '' HUP INT; exec {sys.executable} {driver} {tmp_path}/rank.py {tmp_path}"
    process = subprocess.Popen(
        ["sh", "-c", words], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
    )
    ranks = pids(tmp_path)
    time.sleep(0.3)
    for number in (signal.SIGHUP, signal.SIGINT):
        process.send_signal(number)
    time.sleep(1.0)
    assert process.poll() is None
    assert all(Path(f"/proc/{pid}").exists() for pid in ranks)
    process.terminate()
    assert process.wait(30) == 143
    assert_gone(ranks)


ELASTIC = """
import sys
from launch import local, torchrun
elastic = torchrun.Elastic(f"localhost:{sys.argv[2]}", nproc=2, max_restarts=3)
command = elastic.command(sys.argv[3:], "cpu", entry=(sys.argv[1],))
sys.exit(local.run(command, 20.0, "torchrun", restarts=True))
"""


def start_elastic(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    script = tmp_path / "rank.py"
    script.write_text(RANK + body)
    words = [sys.executable, "-c", ELASTIC, str(script), port, str(tmp_path)]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("number", "body"),
    [
        (signal.SIGTERM, "signal.signal(15, lambda *_: leave(143, 'stopped'))"),
        (signal.SIGUSR1, "signal.signal(10, lambda *_: leave(143, 'stopped'))"),
        (signal.SIGTERM, "signal.signal(15, signal.SIG_DFL)"),  # it comes before the ranks are ready
    ],
)
def test_ranks_that_were_told_to_stop_are_not_started_again(tmp_path: Path, number: int, body: str):
    process = start_elastic(tmp_path, f"{body}\nopen(f'{{folder}}/ready{{rank}}', 'w')\ntime.sleep(60)")
    ranks = pids(tmp_path)
    while len(list(tmp_path.glob("ready*"))) < 2:
        time.sleep(0.05)
    begun = time.monotonic()
    process.send_signal(number)
    assert finish(process)[0] == 143
    assert time.monotonic() - begun < 15  # and not the time for a checkpoint (20 s), or for ever
    assert_gone(ranks)


def test_ranks_that_end_as_those_of_another_host_were_told_to_are_not_started_again(tmp_path: Path):
    """Their agent would wait for that host, which does not come back."""
    line = Preempted(5, None).args[0]
    hold = "signal.signal(15, signal.SIG_IGN)\ntime.sleep(60)"  # the agent starts none again before this one has ended
    begun = time.monotonic()
    process = start_elastic(tmp_path, f"if rank == '0':\n    leave(143, {line!r})\n{hold}")
    code, _, err = finish(process)
    assert (code, len(pids(tmp_path))) == (143, 2), err
    assert time.monotonic() - begun < 30  # which it gives to ranks that it ends


def test_ranks_that_fail_are_started_again(tmp_path: Path):
    body = """
once = f"{folder}/once"
if rank == "0" and not os.path.exists(once):
    open(once, "w")
    leave(1, "once")
leave(0, "")"""
    code, _, err = finish(start_elastic(tmp_path, body))
    assert (code, len(pids(tmp_path, 4))) == (0, 4), err


def test_a_launcher_that_is_killed_outright_takes_its_ranks_along(tmp_path: Path):
    process = start(tmp_path, "time.sleep(60)")
    ranks = pids(tmp_path)
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert_gone(ranks)


def test_noise_of_the_agent_is_parted_from_the_ranks():
    agent = b"E1129 16:22:31.176000 7179 x/torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 3) local_rank: 1 (pid: 7) of binary: p\n"  # noqa: E501
    ours = [b"Traceback (most recent call last):\n", b'  File "a.py", line 1, in f\n', b"ValueError: x\n", b"plain\n"]
    last = [b"Traceback (most recent call last):\n", b'  File "/v/accelerate/commands/launch.py", line 1, in x\n']
    noise = AgentNoise()
    passed = [line for fed in [*ours, agent, *ours, *last, b"====\n"] for line in noise.feed(fed)]
    assert passed == ours * 2
    assert noise.dropped == [agent, *last, b"====\n"]
    assert noise.failure() == Failure(1, 3, "ended with exit code 3")


def test_noise_of_the_agent_is_found_after_a_line_without_end():
    agent = b"E1129 16:22:31.176000 7179 x/torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 7) local_rank: 0 (pid: 7) of binary: p\n"  # noqa: E501
    noise = AgentNoise(first_rank=2)
    assert noise.feed(b"step 3/9" + agent) == [b"step 3/9\n"]
    assert noise.failure() == Failure(2, 7, "ended with exit code 7")
