"""`launch ssh`: ranks on the hosts of a hostfile, each host's started by an agent of ours over one ssh connection."""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launch import torchrun
from launch.command import CLAIM, Command, Device, device_env, threads
from launch.environment import handed_on, secrets
from launch.hostfile import Host
from launch.job import Job, Limits, Site, Task
from launch.plan_env import plan_env
from normscale.errors import LaunchError

DEFAULT_PORT = 29500  # what a command for a person names where no port was asked for
ALIVE_S = 5
INTERFACE = "GLOO_SOCKET_IFNAME"  # by which gloo finds its address without the host's name


@dataclass(frozen=True)
class Place:
    """Where normscale lies on the hosts, and how to reach them."""

    folder: str = field(default_factory=os.getcwd)
    python: str = sys.executable
    ssh: tuple[str, ...] = ("ssh",)

    def ssh_to(self, host: str, command: str, *, lost_after_s: float) -> tuple[str, ...]:
        """Returns the ssh command that runs a shell command on a host, and fails where it would have to ask."""
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": 10,
            "ServerAliveInterval": ALIVE_S,
            "ServerAliveCountMax": max(2, int(lost_after_s) // ALIVE_S),
            "ControlPath": "none",  # a connection of our own: its end is the end of the job there
            "LogLevel": "ERROR",
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return (*self.ssh, "-T", *words, "--", host, command)

    def within(self, words: Sequence[str], before: str = "") -> str:
        """Returns a shell command that runs words in the folder; `before` is shell text, with a space at its end."""
        return f"cd {shlex.quote(self.folder)} && exec {before}{shlex.join(words)}"


@dataclass(frozen=True)
class Meeting:
    """Where the ranks meet: a free port of the first host, by its name, unless told otherwise."""

    port: int = 0
    address: str | None = None
    device: Device = "auto"

    def at(self, hosts: Sequence[Host]) -> str:
        """Returns the address of the first host."""
        return self.address or hosts[0].name.rpartition("@")[2]


def train(
    hosts: Sequence[Host],
    args: Sequence[str],
    *,
    place: Place,
    meeting: Meeting,
    limits: Limits,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Trains on the hosts, `slots` ranks on each; returns the exit code of the first rank that failed.

    Raises:
        LaunchError: a host cannot be reached, or the ranks could not meet.
    """
    _need_ssh(place)
    with job(hosts, place, limits) as launched:
        sites = launched.sites(meeting.port, meeting.at(hosts), by_name=INTERFACE not in environ)
        return launched.run(train_tasks(sites, args, place, meeting, environ))


def train_tasks(
    sites: Sequence[Site], args: Sequence[str], place: Place, meeting: Meeting, environ: Mapping[str, str]
) -> list[Task]:
    """Returns what each host runs.

    Raises:
        LaunchError: GPUs on some hosts and too few, or none, on others.
    """
    hosts = [site.host for site in sites]
    env = train_env(sites, args, meeting, environ)
    commands = _commands(hosts, args, place, (meeting.at(hosts), sites[0].port))
    firsts = [sum(host.slots for host in hosts[:node]) for node in range(len(hosts))]
    return [Task(argv, env, first) for argv, first in zip(commands, firsts, strict=True)]


def train_env(
    sites: Sequence[Site], args: Sequence[str], meeting: Meeting, environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables that ranks get beside their host's own: the same on all hosts, secrets among them.

    Raises:
        LaunchError: GPUs on some hosts and too few, or none, on others.
    """
    world = sum(site.host.slots for site in sites)
    env = handed_on(environ) | secrets(environ) | plan_env(args, world, [site.hostname for site in sites])
    env |= device_env("cpu" if _on_cpu(sites, meeting.device) else "cuda")
    if "OMP_NUM_THREADS" not in env:  # the same everywhere: it is part of what a run is
        env["OMP_NUM_THREADS"] = str(max(1, min(site.cores // site.host.slots for site in sites)))
    threads(1, env)
    return env


def claim(hosts: Sequence[Host], words: Sequence[str], place: Place, limits: Limits, device: Device = "auto") -> int:
    """Runs a claim: a part of its runs on each host, then the verdict on the first.

    `words` are those of `normscale claim run`. A host whose part failed does not stop the others.
    """
    _need_ssh(place)
    env = handed_on(os.environ) | secrets(os.environ) | device_env(device)
    for some, commands in claim_steps(hosts, words, place):
        with job(some, place, limits) as launched:
            launched.sites()
            code = launched.run([Task(argv, env, ranks=False) for argv in commands])
        if code != 0:
            return code
    return 0


def claim_steps(
    hosts: Sequence[Host], words: Sequence[str], place: Place
) -> list[tuple[list[Host], list[tuple[str, ...]]]]:
    """Returns what to run one after the other: hosts and their commands."""
    base = (place.python, *CLAIM, *words)
    count = len(hosts)
    judge = ([hosts[0]], [base])
    if count == 1:
        return [judge]
    return [(list(hosts), [(*base, "--part", f"{part}/{count}") for part in range(1, count + 1)]), judge]


def claim_shown(
    hosts: Sequence[Host], words: Sequence[str], place: Place, limits: Limits, device: Device = "auto"
) -> list[str]:
    """Returns what DRY_RUN=1 prints of a claim, as `train_shown` does."""
    before = _setting(handed_on(os.environ) | device_env(device))
    steps = claim_steps(hosts, words, place)
    return [line for some, commands in steps for line in shown(some, commands, place, limits, before)]


def shown(
    hosts: Sequence[Host],
    commands: Sequence[Sequence[str]],
    place: Place,
    limits: Limits,
    before: str = "",
) -> list[str]:
    """Returns a command for each host that a person can run by hand, side by side; `before` is as of `Place.within`."""
    lines = []
    for host, argv in zip(hosts, commands, strict=True):
        ssh = place.ssh_to(host.name, place.within(argv, before), lost_after_s=limits.lost_after_s)
        lines.append(Command(ssh).shell())
    return lines


def train_shown(
    hosts: Sequence[Host],
    args: Sequence[str],
    *,
    place: Place,
    meeting: Meeting,
    limits: Limits,
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """Returns what DRY_RUN=1 prints; no secret is in it, so a host must have its own."""
    sets = handed_on(environ) | device_env(meeting.device)
    commands = _commands(hosts, args, place, (meeting.at(hosts), meeting.port or DEFAULT_PORT))
    before = _setting(sets)
    if "OMP_NUM_THREADS" not in sets:  # what `train_env` asks the hosts for: equal shares of the cores there
        most = max(host.slots for host in hosts)
        before = before or "env "
        before += f'OMP_NUM_THREADS="$(($(nproc) / {most} ? $(nproc) / {most} : 1))" '
    return shown(hosts, commands, place, limits, before)


def _setting(sets: Mapping[str, str]) -> str:
    """Returns the words before a command, with a space at their end, that set variables for it."""
    return f"env {shlex.join(f'{name}={value}' for name, value in sets.items())} " if sets else ""


def _commands(
    hosts: Sequence[Host], args: Sequence[str], place: Place, master: tuple[str, int]
) -> list[tuple[str, ...]]:
    return [
        torchrun.static(args, nnodes=len(hosts), node=node, nproc=host.slots, master=master, python=place.python)
        for node, host in enumerate(hosts)
    ]


def job(hosts: Sequence[Host], place: Place, limits: Limits) -> Job:
    """Returns a launch whose hosts are reached by ssh."""
    agent = place.within([place.python, "-m", "launch", "agent"])
    return Job(hosts, lambda host: place.ssh_to(host.name, agent, lost_after_s=limits.lost_after_s), limits)


def _need_ssh(place: Place) -> None:
    if shutil.which(place.ssh[0]) is None:
        raise LaunchError(f"{place.ssh[0]}: no such program here; apt-get install openssh-client")


def _on_cpu(sites: Sequence[Site], asked: Device) -> bool:
    """Returns whether the ranks use CPUs: all of them, or none."""
    if asked == "cpu" or (asked == "auto" and not any(site.gpus for site in sites)):
        return True
    short = [site for site in sites if site.gpus < site.host.slots]
    if short:
        lines = [
            f"{site.host.name}: slots={site.host.slots} but {site.gpus} GPU(s); lower it or give --device cpu"
            f"{site.host.where}"
            for site in short
        ]
        raise LaunchError("\n".join(lines))
    return False
