"""`launch deepspeed`: ranks started by DeepSpeed's own launcher, over pdsh.

That launcher sends variables by name and by file (`.deepspeed_env` of the home and the current folder) as shell text
on a command line that everybody on the hosts can read. So it runs in an environment trimmed to what it needs itself,
with DS_ENV_FILE naming no file; words and variables of the ranks travel in one argument of base64 (launch/rank.py),
and secrets not at all.

The hosts are first asked by our own agents, as `launch ssh` does: that they can be reached, run the same code, and have
the port. DeepSpeed's launcher finds our guard under the name of pdsh (launch/pdsh_guard.py), by which pdsh ends with
this process, and the ranks with pdsh.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch import pdsh_claim, ssh
from launch.command import Command, check_port_number, device_env
from launch.environment import handed_on
from launch.hostfile import Host, ranks_of, read_hosts
from launch.job import Limits
from launch.options import dry_run
from launch.pdsh_job import SSH_ARGS, PdshJob
from launch.rank import encoded
from normscale.errors import LaunchError
from normscale.planned import DEVICE, VARIABLE

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_PLAIN = re.compile(r"[\w@+=:,./-]+")


def launch(options: argparse.Namespace, args: list[str]) -> int:
    """Returns the exit code of the launch.

    Raises:
        LaunchError: pdsh is missing, a host cannot be reached, or a path that DeepSpeed's launcher could not send.
    """
    if options.hostfile is None:
        raise LaunchError("--hostfile: none is given; name a file with lines 'HOST slots=RANKS' (HOSTFILE= with make)")
    hosts = read_hosts(options.hostfile, options.include, options.exclude)
    if options.port is not None:
        check_port_number(options.port)
    for what, path in (("this folder", os.getcwd()), ("this Python", sys.executable)):
        if not _PLAIN.fullmatch(path):
            raise LaunchError(f"{what}, {path}: DeepSpeed's launcher needs a path without spaces; use launch ssh")
    for host in hosts:
        if not _NAME.fullmatch(host.name):
            raise LaunchError(
                f"{host.name}: DeepSpeed's launcher knows no such name of a host; give it a plain one in ~/.ssh/config,"
                f" or use launch ssh{host.where}"
            )
    limits, place = Limits(options.grace), ssh.Place()
    if options.claim is not None:
        if dry_run(options):
            print("\n".join(pdsh_claim.shown(hosts, args, place, os.environ, options.device)))
            return 0
        _need_pdsh()
        return pdsh_claim.claim(hosts, args, place, limits, options.device)
    meeting = ssh.Meeting(options.port or 0, options.master_addr, options.device)
    if dry_run(options):
        env = handed_on(os.environ) | device_env(options.device)
        port = options.port or ssh.DEFAULT_PORT
        rendered = command(options.hostfile, hosts, (meeting.at(hosts), port), encoded(args, _kept(env), watch=False))
        print(rendered.shell())
        return 0
    _need_pdsh()
    from launch.__main__ import check_config, say_start

    say_start(check_config(args, sum(host.slots for host in hosts)), ranks_of(hosts))
    with ssh.job(hosts, place, limits) as asked:
        sites = asked.sites(meeting.port, meeting.at(hosts), by_name=ssh.INTERFACE not in os.environ)
        env = _kept(ssh.train_env(sites, args, meeting, os.environ))
    words = encoded(args, env, watch=True)
    with tempfile.TemporaryDirectory(prefix="normscale-hosts-") as folder:
        hostfile = Path(folder, "hosts")  # as we have read it
        hostfile.write_text("".join(f"{host.name} slots={host.slots}\n" for host in hosts), encoding="utf-8")
        rendered = command(hostfile, hosts, (meeting.at(hosts), sites[0].port), words)
        return PdshJob(rendered, hosts, place, limits).run()


def command(hostfile: Path, hosts: Sequence[Host], master: tuple[str, int], words: str) -> Command:
    """Returns the call of DeepSpeed's launcher, in the environment that it may see."""
    sets = {"DS_ENV_FILE": "/dev/null", "PDSH_SSH_ARGS_APPEND": SSH_ARGS}
    argv = (
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile)),
        *("--include", "@".join(host.name for host in hosts)),
        *("--master_addr", master[0], "--master_port", str(master[1])),
        *("--force_multi", "--no_ssh_check", "--no_local_rank", "--launcher_args=-N"),
        *("--module", "launch.rank", words),
    )
    return Command(argv, sets)


def _need_pdsh() -> None:
    if shutil.which("pdsh") is None:
        raise LaunchError("pdsh: no such program here; apt-get install pdsh, or use launch ssh, which needs none")


def _kept(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of the ranks without secrets."""
    return handed_on(env) | {name: env[name] for name in ("ACCELERATE_USE_CPU", DEVICE, VARIABLE) if name in env}
