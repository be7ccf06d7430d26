"""The doctor: what it asks, what it makes of the answers, and that each problem has its mend."""

import copy
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch import doctor, doctor_host
from launch.__main__ import main
from launch.doctor_checks import COMPARED, Seen, problems, table
from launch.doctor_line import LOADER, Line, NoAnswer
from launch.hostfile import Host

ROOT = Path(__file__).parents[2]
QUICK = str(ROOT / "configs/train/quick.yaml")
FACTS: dict[str, Any] = {
    "host": "node0",
    "boot": "b0",
    "python": "3.11.7",
    "packages": {**dict.fromkeys(COMPARED, "1.0"), "torch": "2.13.0"},
    "code": "c0",
    "commit": "abc",
    "cores": 8,
    "memory": 64 << 30,
    "gpus": [{"name": "H200", "bytes": 141 << 30}] * 2,
    "shm": {"all": 32 << 30, "free": 32 << 30},
    "limits": {"NOFILE": 65536, "NPROC": None, "MEMLOCK": None},
    "infiniband": True,
}
RUNS = {"key": "tracking.runs", "path": "runs", "write": True, "wrong": None, "free": 1 << 40}
TEXT = {"key": "data.source", "path": "a.txt", "write": False, "wrong": None, "bytes": 10}


def seen(rank: int = 0, **other: Any) -> Seen:
    name = f"node{rank}"
    facts = {**copy.deepcopy(FACTS), "host": name, "boot": f"b{rank}", **other.pop("facts", {})}
    names = {f"node{k}": [f"10.77.0.1{k}"] for k in range(2)}
    return Seen(Host(name, 2, f"hosts:{rank + 1}"), **{"facts": facts, "names": names, "paths": [RUNS, TEXT], **other})


def packages(**versions: str | None) -> dict[str, Any]:
    return {"facts": {"packages": {**FACTS["packages"], **versions}}}


def test_two_hosts_that_are_alike_have_no_problem() -> None:
    assert problems([seen(0), seen(1)], ["tracking.runs"]) == []


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"gone": "no answer within 15 s"}, "node1: no answer within 15 s (hosts:2)"),
        ({"facts": {"python": "3.12.1"}}, "node1: Python 3.12.1, and node0 has 3.11.7; use the same"),
        ({"facts": {"python": "3.9.1"}}, "node1: Python 3.9.1 is too old; install 3.11"),
        (packages(torch=None), "node1: torch not installed; run make test there"),
        (packages(deepspeed=None), "node1: other packages than node0: deepspeed none (there 1.0); install from"),
        (packages(torch="2.13.0+cpu"), "node1: 2 GPU(s), and PyTorch 2.13.0+cpu cannot use them; make test TORCH"),
        ({"facts": {"code": "c1", "commit": "abd+"}}, "node1: other sources than node0 (abd+, there abc); bring both"),
        ({"facts": {"code": None, "commit": None}}, "node1: no checkout of normscale in the folder"),
        ({"facts": {"gpus": FACTS["gpus"][:1]}}, "node1: slots=2 and 1 GPU(s), one a rank; lower the slots (hosts:2)"),
        (
            {"facts": {"gpus": [{"name": "A100", "bytes": 80 << 30}] * 2}},
            "node1: other GPUs: 2 GPU(s) ['A100 85.9 GB']",
        ),
        ({"facts": {"gpus": [], "cores": 1}}, "node1: slots=2 and 1 core(s); lower the slots (hosts:2)"),
        ({"facts": {"shm": {"all": 64 << 20, "free": 0}}}, "node1: /dev/shm has 67.1 MB; ranks of one host want more:"),
        ({"facts": {"limits": {**FACTS["limits"], "NOFILE": 256}}}, "node1: 256 open files are allowed (ulimit -n)"),
        ({"facts": {"limits": {**FACTS["limits"], "MEMLOCK": 65536}}}, "node1: InfiniBand needs unlimited locked"),
        ({"clock": (-3.0, 0.01)}, "node1: its clock is 3.0 s (±0.01) behind this machine's; start an NTP service"),
        ({"names": {"node0": [], "node1": ["10.77.0.11"]}}, "node1: does not know the name node0; add it to"),
        (
            {"names": {"node0": ["10.77.0.10"], "node1": ["127.0.1.1"]}},
            "node1: its own name, node1, is 127.0.1.1 there",
        ),
        ({"unreached": {"node0": "timed out"}}, "node1: cannot connect to node0 (timed out); open the firewall"),
        ({"paths": [{**RUNS, "wrong": "/ cannot be written (x)"}, TEXT]}, "node1: tracking.runs: runs: / cannot be"),
        ({"paths": [{**RUNS, "free": 1 << 20}, TEXT]}, "node1: tracking.runs: runs has 1.05 MB left; free some space"),
        ({"paths": [RUNS, {**TEXT, "wrong": "No such file"}]}, "node1: data.source: a.txt: No such file; copy it"),
        ({"paths": [RUNS, {**TEXT, "bytes": 9}]}, "node1: data.source: a.txt has 9 bytes, on node0 10; copy it from"),
        ({"shared": {"tracking.runs": False}}, "node1: tracking.runs: runs is not the folder that node0 has by that"),
        ({"facts": {"host": "node0", "boot": "b0"}}, "node1: node0 and it are one machine node0; name it once"),
        ({"facts": {"host": "node0"}}, "node1: node0 and it are two machines that both call themselves node0; give"),
    ],
)
def test_each_problem_is_a_line_that_names_the_host_and_the_mend(other: dict[str, Any], says: str) -> None:
    found = problems([seen(0), seen(1, **other)], ["tracking.runs"])
    assert any(line.startswith(says) for line in found), found
    assert all(line.startswith("node1: ") for line in found)


def test_what_may_be_is_no_problem() -> None:
    assert problems([seen(0), seen(1, clock=(3.0, 2.5))]) == []  # it may be an exchange that was slow
    assert problems([seen(0), seen(1, shared={"tracking.runs": False})]) == []  # nothing needs it
    alone = seen(0, names={"node0": ["127.0.1.1"]})
    assert problems([alone]) == []
    lost = seen(1, gone="unknown host")
    assert problems([seen(0, names={"node0": ["10.77.0.10"], "node1": []}), lost]) == ["node1: unknown host (hosts:2)"]


def test_the_table_has_a_row_for_each_host() -> None:
    lines = table([seen(0, clock=(0.0012, 0.0004)), seen(1, gone="x")])
    assert lines[0].split()[:5] == ["host", "python", "torch", "code", "clock"]
    assert lines[1].split("  ")[0] == "node0"
    assert "+0.001 s ±0.000" in lines[1]
    assert "2 x H200 151 GB" in lines[1]
    assert lines[2] == "node1  no answer"


def test_a_host_is_asked_line_by_line_whatever_its_shell_says() -> None:
    shell = f"echo Welcome; echo 'a warning' >&2; exec {shlex.join([sys.executable, '-c', LOADER])}"
    line = Line("here", ["sh", "-c", shell])
    try:
        facts = line.ask("facts", 20, packages=["torch", "no-such-package"])
        assert (facts["host"], facts["packages"]["no-such-package"]) == (socket.gethostname(), None)
        offset, bound = line.offset(20)
        assert abs(offset) <= bound < 1
        with pytest.raises(NoAnswer, match="a check failed there"):
            line.ask("sees", 20, path=1, token="x")
        assert line.ask("clock", 20) == pytest.approx(time.time(), abs=5)
    finally:
        line.close()


def test_a_host_that_says_nothing_is_given_up() -> None:
    begun = time.monotonic()
    with pytest.raises(NoAnswer, match=r"no answer within 0\.5 s"):
        Line("silent", ["sleep", "60"]).ask("clock", 0.5)
    assert time.monotonic() - begun < 10
    with pytest.raises(NoAnswer, match="connection refused"):
        Line("off", ["sh", "-c", "echo 'connect to host off port 22: Connection refused' >&2; exit 255"]).ask(
            "clock", 9
        )


def test_paths_are_tried_and_left_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789")
    wanted = [
        {"key": "data.source", "path": str(tmp_path / "a.txt"), "write": False},
        {"key": "data.source", "path": str(tmp_path / "b.txt"), "write": False},
        {"key": "tracking.runs", "path": str(tmp_path / "new" / "runs"), "write": True},
    ]
    found = doctor_host.paths(wanted)
    assert [one["wrong"] for one in found] == [None, "No such file or directory", None]
    assert (found[0]["bytes"], found[2]["free"] > 0) == (10, True)
    assert doctor_host.leave(str(tmp_path / "new"), "token")
    assert doctor_host.sees(str(tmp_path / "new"), "token")
    assert doctor_host.remove(str(tmp_path / "new"), "token")
    assert not doctor_host.sees(str(tmp_path / "new"), "token")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


def test_ports_and_names_are_tried() -> None:
    port = doctor_host.listen()["port"]
    with socket.create_connection(("127.0.0.1", port)) as heard:
        assert heard.recv(1) == b""  # closed there first: that side remembers the connection for a minute
    assert doctor_host.connect([("127.0.0.1", port)], 2) == {}
    assert "in use" in doctor_host.free(port)["wrong"]
    doctor_host.silence()
    assert doctor_host.connect([("127.0.0.1", port)], 2) == {"127.0.0.1": "Connection refused"}
    assert doctor_host.free(port) == {"port": port}
    assert "127.0.0.1" in doctor_host.names(["localhost"])["localhost"]


def test_the_sources_are_told_apart(tmp_path: Path) -> None:
    assert doctor_host.sources(str(tmp_path)) is None
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "a.py").write_text("a = 1\n")
    before = doctor_host.sources(str(tmp_path))
    (tmp_path / "launch" / "a.txt").write_text("no source")
    assert doctor_host.sources(str(tmp_path)) == before
    (tmp_path / "launch" / "a.py").write_text("a = 2\n")
    assert doctor_host.sources(str(tmp_path)) not in (None, before)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--hostfile", "nowhere"], "nowhere: no such hostfile"),
        (["--hostfile", ""], "--hostfile: it names no file"),
        (["--hostfile", "a", "--nodes", "b"], "--nodes: not allowed with argument --hostfile"),
        (["--nodes", "a,,b"], "--nodes a,,b: '' is not the name of a host"),
        (["--nodes=-oProxyCommand=x"], "'-oProxyCommand=x' is not the name of a host"),
        (["--nodes", "a,a"], "a host is there twice"),
        (["--port", "0"], "--port 0: a port is a number"),
        (["--timeout", "0"], "--timeout 0: give seconds"),
        (["--", "nowhere.yaml"], "nowhere.yaml"),
        (["--", QUICK, "train.stepz=1"], "train.stepz"),
    ],
)
def test_bad_input_asks_nobody(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert (said.err.count("\n"), said.out) == (1, "")


def test_a_dry_run_shows_how_each_host_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--nodes", "a,b", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("ssh -T -o BatchMode=yes")
    assert " -- b " in lines[1]


def test_the_paths_of_a_configuration_are_those_it_reads_and_writes() -> None:
    words = [QUICK, "data.source=a.txt", "tracking.runs=/shared/runs", "checkpoint.every=5"]
    wanted, sharing = doctor._wanted(words)
    assert [(one["key"], one["path"], one["write"]) for one in wanted] == [
        ("CONFIG", QUICK, False),
        ("data.source", "a.txt", False),
        ("tracking.runs", "/shared/runs", True),
    ]
    assert sharing == ["tracking.runs"]
    assert [one["key"] for one in doctor._wanted([QUICK])[0]] == ["CONFIG", "tracking.runs"]


@pytest.mark.slow
def test_this_machine_reduces_with_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launch", "doctor", "--", QUICK], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("this machine  ")
    assert lines[3].startswith("all-reduce (gloo, 2 ranks: this machine, this machine again): ")
    assert lines[3].endswith("GB/s for 16 MiB")
    assert lines[-1] == "no problem found"


@pytest.mark.slow
def test_hosts_are_asked_side_by_side_and_those_that_cannot_be_are_named(
    hosts_here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("launch.doctor_examination.ANSWER_S", 30.0)
    (hosts_here / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\nrefused slots=1\nnokey slots=1\n")
    assert main(["doctor", "--hostfile", str(hosts_here / "hosts")]) == 1
    table, reduced, said, count = capsys.readouterr().out.rstrip("\n").split("\n\n")
    assert [line.split()[0] for line in table.splitlines()] == ["host", "localhost", "127.0.0.1", "refused", "nokey"]
    assert reduced.startswith("all-reduce (gloo, 2 ranks: localhost, 127.0.0.1): ")
    assert count == f"{len(said.splitlines())} problems found"
    assert reduced.endswith("GB/s for 16 MiB")
    assert said.splitlines() == [
        f"refused: connection refused: start sshd there, or give its port in ~/.ssh/config ({hosts_here}/hosts:3)",
        f"nokey: no key is accepted: ssh-copy-id nokey ({hosts_here}/hosts:4)",
        *[line for line in said.splitlines() if "its own name" in line],
        f"127.0.0.1: localhost and it are one machine {socket.gethostname()}; name it once, with all its slots"
        f" ({hosts_here}/hosts:2)",
    ]
    assert not [name for name in os.listdir(ROOT) if name.startswith(".normscale-doctor")]
