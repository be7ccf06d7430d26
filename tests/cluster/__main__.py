"""`python -m tests.cluster up [N] [--slurm]`, `exec HOST COMMAND...`, `down`: hosts for a person to try things on.

`exec all` runs the command on each host in turn. The hosts belong to a process in the background, which `down` ends.
`hostfile` in the cluster's folder, which `up` prints, names them.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster.common import HERE, PYTHON, bare_environment
from tests.cluster.hosts import Cluster
from tests.cluster.needs import why_not
from tests.cluster.slurm import Slurm

SKIPPED = 77  # the code of a test that cannot run here
NOTE = Path(tempfile.gettempdir(), f"normscale-cluster-of-{os.getuid()}")


def main(words: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start hosts in the background")
    up.add_argument("size", type=int, nargs="?", default=2)
    up.add_argument("--slurm", action="store_true", help="and Slurm on them")
    run = commands.add_parser("exec", help="run a command on a host")
    run.add_argument("host")
    run.add_argument("words", nargs=argparse.REMAINDER)
    commands.add_parser("down", help="end the hosts")
    options = parser.parse_args(words)
    if options.command == "up":
        return start(options.size, options.slurm)
    if options.command == "exec":
        return execute(options.host, options.words)
    return stop()


def start(size: int, slurm: bool) -> int:
    """Starts the hosts, and the process that they belong to."""
    if reason := why_not():
        print(reason, file=sys.stderr)
        return SKIPPED
    if keeper() is not None:
        print("hosts are up already; down ends them", file=sys.stderr)
        return 2
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        with os.fdopen(read) as said:
            line = said.read()
        print(line, end="", file=sys.stdout if line.startswith("up") else sys.stderr)
        return 0 if line.startswith("up") else 1
    os.setsid()
    os.close(read)
    with Cluster(size) as cluster, os.fdopen(write, "w") as said:
        try:
            if slurm:
                Slurm(cluster).up()
            hostfile = cluster.folder / "hostfile"
            hostfile.write_text("".join(f"{host.name} slots=2\n" for host in cluster))
            pids = " ".join(f"{host.name}={host.pid}" for host in cluster)
            NOTE.write_text(f"{os.getpid()} {_start_of(os.getpid())} {pids}\n")
            print(f"up: {', '.join(host.name for host in cluster)}; {hostfile}", file=said, flush=True)
        except Exception as error:
            print(error, file=said, flush=True)
            return 1
        said.close()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(quiet, stream)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        signal.sigwait({signal.SIGTERM})
    NOTE.unlink(missing_ok=True)
    return 0


def execute(name: str, words: list[str]) -> int:
    """Runs a command on one host, or on all one after the other; returns the first code that is not 0."""
    noted = keeper()
    if noted is None:
        print("no hosts are up", file=sys.stderr)
        return 2
    hosts = dict(word.split("=") for word in noted[2:])
    if name != "all" and name not in hosts:
        print(f"{name} is not one of {', '.join(hosts)}", file=sys.stderr)
        return 2
    codes = []
    for pid in hosts.values() if name == "all" else [hosts[name]]:
        entered = [*PYTHON, str(HERE / "enter.py"), str(os.getpid()), pid, os.getcwd(), *words]
        codes.append(subprocess.run(entered, env=bare_environment()).returncode)
    return next((code for code in codes if code), 0)


def stop() -> int:
    """Ends the hosts."""
    noted = keeper()
    if noted is None:
        print("no hosts were up")
        return 0
    os.kill(int(noted[0]), signal.SIGTERM)
    while keeper() is not None:
        time.sleep(0.02)
    return 0


def keeper() -> list[str] | None:
    """Returns the number, the start and the hosts of the process that the hosts belong to, if it is alive."""
    try:
        noted = NOTE.read_text().split()
        return noted if _start_of(int(noted[0])) == noted[1] else None
    except (OSError, ValueError, IndexError):
        return None


def _start_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
