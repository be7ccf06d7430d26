"""`launch deepspeed --claim`: a part of the claim on each host, over pdsh, and then the verdict on the first.

A part is one process, of which DeepSpeed's launcher knows nothing, so that pdsh starts it without that launcher: under
our guard, with a lifeline, and with its words in one argument of base64, as it starts ranks (launch/rank.py). pdsh
numbers its hosts from 0 and writes the number where a command has %n.
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from launch import ssh
from launch.command import CLAIM, Command, Device, device_env
from launch.environment import handed_on
from launch.hostfile import Host
from launch.job import Limits
from launch.pdsh_job import SSH_ARGS, PdshJob
from launch.rank import encoded
from launch.ssh import Place


def claim(hosts: Sequence[Host], words: Sequence[str], place: Place, limits: Limits, device: Device = "auto") -> int:
    """Returns the exit code of the launch: 0, or that of the part that failed first, which stops no other."""
    with ssh.job(hosts, place, limits) as asked:
        asked.sites()
    for some, parts in steps(hosts):
        job = encoded(words, handed_on(os.environ) | device_env(device), watch=True, parts=parts)
        rendered = over_pdsh(some, place, f"exec env RANK=%n {shlex.join([place.python, '-um', 'launch.rank', job])}")
        code = PdshJob(rendered, [replace(host, slots=1) for host in some], place, limits, ranks=False).run()
        if code != 0:
            return code
    return 0


def shown(
    hosts: Sequence[Host], words: Sequence[str], place: Place, environ: Mapping[str, str], device: Device = "auto"
) -> Iterator[str]:
    """Gives what DRY_RUN=1 prints: the calls of pdsh that a person would make one after the other."""
    env = [f"{name}={value}" for name, value in (handed_on(environ) | device_env(device)).items()]
    argv = [*(["env", *env] if env else []), place.python, *CLAIM, *words]
    for some, parts in steps(hosts):
        part = f" --part $((%n + 1))/{parts}" if parts > 1 else ""
        yield over_pdsh(some, place, f"exec {_literal(shlex.join(argv))}{part}").shell()


def steps(hosts: Sequence[Host]) -> list[tuple[list[Host], int]]:
    """Returns what to run one after the other: hosts, and the number of parts of which each runs one; 1: the whole."""
    judge = (list(hosts[:1]), 1)
    return [judge] if len(hosts) == 1 else [(list(hosts), len(hosts)), judge]


def over_pdsh(hosts: Sequence[Host], place: Place, shell: str) -> Command:
    """Returns the call of pdsh that runs a shell command in the folder on all hosts."""
    names = ",".join(host.name for host in hosts)
    labels = () if len(hosts) > 1 else ("-N",)
    there = f"cd {_literal(shlex.quote(place.folder))} && {shell}"
    return Command(
        ("pdsh", "-S", "-f", "1024", "-R", "ssh", *labels, "-w", names, there), {"PDSH_SSH_ARGS_APPEND": SSH_ARGS}
    )


def _literal(text: str) -> str:
    """Returns a text in which pdsh replaces nothing."""
    return text.replace("%", "%%")
