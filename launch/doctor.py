"""`python -m launch doctor`: asks every host, before anything is trained there, what would go wrong.

All hosts are asked at once, each within a time limit. The last check is an all-reduce over all of them.
"""

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.doctor_examination import Examination, argv_of
from launch.hostfile import Host, read_hosts
from launch.options import made_words
from launch.ssh import Place
from normscale.arguments import Parser, whole
from normscale.errors import LaunchError

REDUCE_S = 60.0


def main(words: Sequence[str]) -> int:
    """Returns 0 where everything is well, 1 where a problem was found.

    Raises:
        LaunchError: the hosts, an option or the configuration are wrong.
    """
    words = list(words)
    mark = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:mark])
    args = made_words(os.environ, with_config=True) if options.from_make else words[mark + 1 :]
    hosts = _hosts(options)
    wanted, sharing = _wanted(args)
    place = Place(options.remote_dir or os.getcwd(), options.remote_python or sys.executable)
    if options.dry_run or os.environ.get("DRY_RUN", "") not in ("", "0"):
        print("\n".join(_shown(hosts, place)))
        return 0
    if hosts and shutil.which("ssh") is None:
        raise LaunchError("ssh: no such program here; apt-get install openssh-client")
    examination = Examination(hosts, place, options.port, options.timeout)
    try:
        return examination.run(wanted, sharing)
    finally:
        examination.close()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m launch doctor",
        usage="python -m launch doctor [--hostfile F | --nodes A,B] [options] [-- CONFIG key=value ...]",
        description="Asks this machine, or each host, what would go wrong in training. Exit code 1: something would.",
        allow_abbrev=False,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hostfile", metavar="F", help="hosts with lines 'HOST slots=RANKS'")
    where.add_argument("--nodes", metavar="A,B", help="hosts by name")
    parser.add_argument("--port", type=whole, metavar="P", help="the port ranks will meet at (default: a free one)")
    parser.add_argument(
        "--timeout", type=float, default=REDUCE_S, metavar="S", help=f"for the all-reduce (default {REDUCE_S:g})"
    )
    parser.add_argument("--remote-dir", metavar="D", help="the checkout on the hosts (default: this folder's path)")
    parser.add_argument("--remote-python", metavar="P", help="Python on the hosts (default: the path of this one)")
    parser.add_argument("--dry-run", action="store_true", help="print how each host is asked, and stop")
    parser.add_argument("--from-make", action="store_true", help=argparse.SUPPRESS)
    return parser


def _hosts(options: argparse.Namespace) -> list[Host]:
    """Returns the hosts that were named; none: this machine."""
    if not 1 <= options.timeout <= 3600:
        raise LaunchError(f"--timeout {options.timeout:g}: give seconds from 1 to 3600")
    if options.port is not None and not 1 <= options.port <= 65535:
        raise LaunchError(f"--port {options.port}: a port is a number from 1 to 65535")
    if options.hostfile == "":
        raise LaunchError("--hostfile: it names no file; name one, or leave it out for this machine alone")
    if options.hostfile is not None:
        return read_hosts(Path(options.hostfile))
    if options.nodes is None:
        return []
    names = [name.strip() for name in options.nodes.split(",")]
    wrong = next((name for name in names if not name or name.startswith("-") or any(c.isspace() for c in name)), None)
    if wrong is not None:
        raise LaunchError(f"--nodes {options.nodes}: {wrong!r} is not the name of a host; give e.g. node1,node2")
    if len(set(names)) < len(names):
        raise LaunchError(f"--nodes {options.nodes}: a host is there twice; name each once")
    return [Host(name, 1) for name in names]


def _wanted(args: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the paths that the configuration reads and writes, and the keys of those that hosts must share."""
    if not args:
        return [{"key": "tracking.runs", "path": "runs", "write": True}], []
    from normscale.config.load import read

    config = read(Path(args[0]), list(args[1:])).config
    wanted: list[dict[str, Any]] = [{"key": "CONFIG", "path": args[0], "write": False}]
    sources = [("data.source", config.data.source), ("data.held_out_source", config.data.held_out_source)]
    for key, source in sources:
        if source is None or source == "embedded" or source.startswith("hub:") or config.task in ("copy", "reverse"):
            continue
        endings = [f".{language}" for language in config.data.languages or ()] if config.task == "translation" else [""]
        wanted += [{"key": key, "path": source + ending, "write": False} for ending in endings]
    wanted.append({"key": "tracking.runs", "path": config.tracking.runs, "write": True})
    return wanted, ["tracking.runs"] if config.checkpoint.every else []


def _shown(hosts: Sequence[Host], place: Place) -> list[str]:
    """Returns how each host is asked: Python there, with questions on its standard input."""
    return [f"{shlex.join(argv_of(host, place))} < questions" for host in (hosts or (None,))]
