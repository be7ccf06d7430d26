"""`launch ssh`: the commands as text, what hosts are asked and told, and every way not to reach one."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch import ssh
from launch.__main__ import main
from launch.command import Device
from launch.hostfile import Host
from launch.job import Limits, Site, Task
from launch.remote import why_unreachable
from normscale.errors import LaunchError
from normscale.planned import planned_in

from .test_command import AWKWARD
from .test_main import QUICK

HOSTS = [Host("n0", 1, "hosts:1"), Host("me@n1", 2, "hosts:2")]
PLACE = ssh.Place("/work/it's here", "/venv/bin/python")
SITES = [Site(HOSTS[0], "n0.local", cores=8, gpus=0, port=4567), Site(HOSTS[1], "n1.local", cores=4, gpus=0)]


def test_a_command_for_each_host():
    lines = ssh.train_shown(
        HOSTS, ["c.yaml", "name=a b"], place=PLACE, meeting=ssh.Meeting(4567), limits=Limits(), environ={}
    )
    options = (
        "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=6 "
        "-o ControlPath=none -o LogLevel=ERROR"
    )
    assert [shlex.split(line)[:-1] for line in lines] == [
        shlex.split(f"ssh -T {options} -- {name}") for name in ("n0", "me@n1")
    ]
    assert [shlex.split(line)[-1] for line in lines] == [
        "cd '/work/it'\"'\"'s here' && exec env "
        'OMP_NUM_THREADS="$(($(nproc) / 2 ? $(nproc) / 2 : 1))" '
        "/venv/bin/python -m torch.distributed.run --nnodes 2 --node-rank "
        f"{node} --nproc-per-node {slots} --master-addr n0 --master-port 4567 --max-restarts 0 "
        "-m normscale train c.yaml 'name=a b'"
        for node, slots in ((0, 1), (1, 2))
    ]


def test_two_shells_give_the_words_back():
    (line,) = ssh.train_shown(
        HOSTS[:1], AWKWARD, place=ssh.Place("/", "echo"), meeting=ssh.Meeting(), limits=Limits(), environ={}
    )
    remote = shlex.split(line)[-1].replace(" echo ", ' sh -c \'printf "%s\\0" "$OMP_NUM_THREADS" "$@"\' - ')
    done = subprocess.run(["sh", "-c", remote], capture_output=True, text=True, check=True)
    threads, *words = done.stdout.split("\0")[:-1]
    assert words[words.index("train") + 1 :] == AWKWARD
    assert 1 <= int(threads) <= (os.cpu_count() or 1)


def test_no_secret_is_shown():
    environ = {"MLFLOW_TRACKING_PASSWORD": "hush", "NCCL_DEBUG": "INFO", "MLFLOW_TRACKING_URI": "http://a:hush@b"}
    text = "\n".join(
        ssh.train_shown(HOSTS, ["c"], place=PLACE, meeting=ssh.Meeting(), limits=Limits(), environ=environ)
    )
    assert "hush" not in text
    assert text.count("exec env NCCL_DEBUG=INFO OMP_NUM_THREADS=") == 2


def test_what_each_host_runs():
    environ = {"MLFLOW_TRACKING_PASSWORD": "hush", "HOME": "/root"}
    first, second = ssh.train_tasks(SITES, [QUICK, "a=1"], PLACE, ssh.Meeting(), environ)
    assert (first.first_rank, second.first_rank) == (0, 1)
    assert first.argv[-2:] == (QUICK, "a=1")
    assert "--master-addr n0 --master-port 4567" in " ".join(second.argv)
    assert first.env == second.env
    plan = planned_in(first.env)
    assert plan is not None
    assert (plan.world, plan.hosts) == (3, ("n0.local", "n1.local"))
    rest = {name: value for name, value in first.env.items() if name != "NORMSCALE_PLAN"}
    assert rest == {"MLFLOW_TRACKING_PASSWORD": "hush", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "2"}
    assert "hush" not in repr(first)


def test_gpus_are_all_or_none():
    some = [Site(HOSTS[0], "n0", 8, 1), Site(HOSTS[1], "n1", 8, 1)]
    with pytest.raises(LaunchError, match=r"me@n1: slots=2 but 1 GPU\(s\); lower it or give --device cpu \(hosts:2\)"):
        ssh.train_env(some, [QUICK], ssh.Meeting(), {})
    assert "ACCELERATE_USE_CPU" in ssh.train_env(some, [QUICK], ssh.Meeting(device="cpu"), {})
    enough = [Site(HOSTS[0], "n0", 8, 1), Site(HOSTS[1], "n1", 8, 2)]
    env = ssh.train_env(enough, [QUICK], ssh.Meeting(), {})
    assert (env.get("NORMSCALE_DEVICE"), env.get("ACCELERATE_USE_CPU")) == ("cuda", None)
    with pytest.raises(LaunchError, match="n0: slots=1 but 0 GPU"):
        ssh.train_env(SITES, [QUICK], ssh.Meeting(device="cuda"), {})


def test_a_claim_is_parts_and_then_a_judge_on_the_first_host():
    (hosts, parts), (judges, (judge,)) = ssh.claim_steps(HOSTS, ["depth", "--profile", "cpu"], PLACE)
    base = ("/venv/bin/python", "-m", "normscale", "claim", "run", "depth", "--profile", "cpu")
    assert (hosts, judges) == (HOSTS, HOSTS[:1])
    assert parts == [(*base, "--part", "1/2"), (*base, "--part", "2/2")]
    assert judge == base
    assert ssh.claim_steps(HOSTS[:1], ["depth"], PLACE) == [(HOSTS[:1], [base[:6]])]


@pytest.mark.parametrize(("device", "sets"), [("cpu", "ACCELERATE_USE_CPU=true"), ("cuda", "NORMSCALE_DEVICE=cuda")])
def test_a_claim_keeps_to_the_device(device: Device, sets: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", {"NCCL_DEBUG": "x"})
    lines = ssh.claim_shown(HOSTS, ["depth"], PLACE, Limits(), device)
    assert len(lines) == 3
    assert all(f"exec env NCCL_DEBUG=x {sets} /venv/bin/python -m normscale claim run" in line for line in lines)


class Told:
    """Stands for the job of a claim; keeps what each host was to run."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def __enter__(self) -> "Told":
        return self

    def __exit__(self, *_: object) -> None: ...

    def sites(self) -> None: ...

    def run(self, tasks: list[Task]) -> int:
        self.tasks += tasks
        return 0


def test_a_claim_that_runs_keeps_to_the_device_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    told = Told()
    monkeypatch.setattr(ssh, "job", lambda *_: told)
    monkeypatch.setattr(shutil, "which", lambda program: program)
    (tmp_path / "hosts").write_text("n0 slots=1\nn1 slots=1\n")
    words = ["ssh", "--hostfile", str(tmp_path / "hosts"), "--device", "cpu", "--claim", "depth-ablation"]
    assert main(words) == 0
    assert [task.env.get("ACCELERATE_USE_CPU") for task in told.tasks] == ["true"] * 3


@pytest.mark.parametrize(
    ("code", "words", "says"),
    [
        (255, "ssh: Could not resolve hostname n9: Name or service not known", "unknown host: mend"),
        (255, "ssh: connect to host n9 port 22: Connection refused", "connection refused: start sshd"),
        (255, "ssh: connect to host n9 port 22: Connection timed out", "no answer: is it on"),
        (255, "root@n9: Permission denied (publickey).", "no key is accepted: ssh-copy-id n9"),
        (255, "Host key verification failed.", "connect once by hand (ssh n9)"),
        (255, "kex_exchange: bad", "ssh failed: kex_exchange: bad"),
        (1, "sh: 1: cd: can't cd to /no", "give it with --remote-dir"),
        (127, "sh: 1: exec: /no/python: not found", "no such Python there"),
        (1, "/usr/bin/python3: No module named launch", "no checkout of normscale"),
        (1, "ModuleNotFoundError: No module named 'pydantic'", "lacks a package"),
        (3, "boom", "its agent ended with exit code 3: boom"),
    ],
)
def test_why_a_host_cannot_be_reached(code: int, words: str, says: str):
    said = why_unreachable("n9", code, ["Welcome", words])
    assert says in said
    assert "\n" not in said


def launch(hosts: str, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[str]]:
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in hosts.split()))
    code = main(["ssh", "--hostfile", str(folder / "hosts"), *options, "--", QUICK])
    return code, capsys.readouterr().err.splitlines()


def test_every_host_that_cannot_be_reached_has_a_line(hosts_here: Path, capsys: pytest.CaptureFixture[str]):
    code, lines = launch("alpha refused nowhere nokey", hosts_here, capsys)
    assert code == 2
    assert [line.partition(":")[2].split(":")[0].strip() for line in lines] == ["refused", "nowhere", "nokey"]
    assert [line.rpartition(" ")[2] for line in lines] == [f"({hosts_here}/hosts:{number})" for number in (2, 3, 4)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--remote-dir", "/nowhere/at all"], "--remote-dir"),
        (["--remote-python", "/nowhere/python"], "--remote-python"),
    ],
)
def test_what_is_missing_on_a_host(hosts_here: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str):
    code, lines = launch("alpha", hosts_here, capsys, *options)
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith("normscale: alpha: ")
    assert says in lines[0]


def test_a_host_that_does_not_answer_in_time(hosts_here: Path, capsys: pytest.CaptureFixture[str]):
    code, lines = launch("alpha silent", hosts_here, capsys, "--connect", "1.5")
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith("normscale: silent: no answer within 2 s")


def test_a_busy_port_is_said_before_any_rank_starts(hosts_here: Path, capsys: pytest.CaptureFixture[str]):
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, lines = launch("localhost", hosts_here, capsys, "--port", port)
    assert (code, len(lines)) == (2, 1)
    assert f"localhost: port {port}: address already in use; choose another, or leave --port out" in lines[0]


def test_a_name_that_hosts_do_not_know_is_said(hosts_here: Path, capsys: pytest.CaptureFixture[str]):
    code, lines = launch("localhost alpha", hosts_here, capsys, "--master-addr", "no.such.invalid")
    assert code == 2
    assert [line.split()[1] for line in lines] == ["localhost:", "alpha:"]
    assert all("does not know no.such.invalid, where the ranks meet" in line for line in lines)


def test_another_copy_of_the_code_is_refused(hosts_here: Path, capsys: pytest.CaptureFixture[str]):
    other = hosts_here / "checkout"
    root = Path(__file__).parents[2]
    (other / "normscale").mkdir(parents=True)
    for name in ("planned.py", "errors.py", "arguments.py", "__init__.py"):
        (other / "normscale" / name).write_bytes((root / "normscale" / name).read_bytes())
    (other / "launch").symlink_to(root / "launch")
    code, lines = launch("localhost", hosts_here, capsys, "--remote-dir", str(other))
    assert (code, len(lines)) == (2, 1)
    assert "localhost: its copy of normscale is another" in lines[0]


ENTRY = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def test_words_and_variables_arrive_byte_for_byte_and_on_no_command_line(
    hosts_here: Path, monkeypatch: pytest.MonkeyPatch
):
    odd = "a b'\"$HOME`id`\n$$ é"
    environ = {"NORMSCALE_X": odd, "MLFLOW_TRACKING_PASSWORD": "hush", "RANK": "9", "ACCELERATE_X": "1"}
    code = f"""
import os, sys
from launch import ssh
from launch.hostfile import Host
from launch.job import Limits, Task
hosts = [Host("alpha", 1)]
with ssh.job(hosts, ssh.Place(), Limits()) as job:
    job.sites()
    env = ssh.handed_on(os.environ) | ssh.secrets(os.environ)
    sys.exit(job.run([Task((sys.executable, "-c", {ENTRY!r}, *{AWKWARD!r}), env, ranks=False)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    words, seen = json.loads(done.stdout)
    assert words == AWKWARD
    assert (seen["NORMSCALE_X"], seen["MLFLOW_TRACKING_PASSWORD"]) == (odd, "hush")
    assert seen["PATH"].startswith(f"{os.path.dirname(sys.executable)}:")
    assert not {"RANK", "ACCELERATE_X"} & set(seen)
    assert "hush" not in (hosts_here / "ssh.log").read_text()


def test_a_host_under_two_names_is_refused(
    hosts_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 1 10.0.0.2 22")
    code, lines = launch("alpha beta", hosts_here, capsys)
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith("normscale: beta: is the same host as alpha; write it once, with all its slots (")


def test_a_meeting_place_that_no_host_reaches_is_said_before_any_rank_starts(
    hosts_here: Path, capsys: pytest.CaptureFixture[str]
):
    code, lines = launch("alpha", hosts_here, capsys, "--master-addr", "240.0.0.1")
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith("normscale: alpha: cannot reach 240.0.0.1:")
