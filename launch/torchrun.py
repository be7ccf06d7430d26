"""The commands of torchrun: ranks of one host of several, at a fixed place or by a rendezvous."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launch.command import (
    ENTRY,
    Command,
    Device,
    check_port_number,
    check_ranks,
    choose_device,
    device_env,
    is_stray,
    threads,
)
from normscale.errors import LaunchError
from normscale.planned import SINCE, VARIABLE, fresh_since

TORCHRUN = ("-m", "torch.distributed.run")
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_END_POINT = re.compile(r"(?P<host>[^\s:]+|\[[^\s\]]+\]):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class Elastic:
    """A rendezvous of `nnodes` hosts at `rdzv`, HOST:PORT, whose agents may start ranks that failed again."""

    rdzv: str
    nnodes: str = "1"
    nproc: int = 1
    rdzv_id: str = "normscale"
    max_restarts: int = 0

    def world(self) -> int:
        """Returns the number of ranks."""
        return nodes(self.nnodes) * self.nproc

    def command(
        self,
        args: Sequence[str],
        device: Device = "auto",
        environ: Mapping[str, str] = os.environ,
        node: int | None = None,
        entry: Sequence[str] = ENTRY,
    ) -> Command:
        """Returns what every host runs: the same on each, or with its number `node` where there is one.

        Raises:
            LaunchError: a value that torchrun could not use.
        """
        place = _END_POINT.fullmatch(self.rdzv)
        if not place:
            raise LaunchError(f"--rdzv {self.rdzv}: not HOST:PORT; name the first host and a free port, e.g. n1:29500")
        check_port_number(int(place["port"]), f"--rdzv {self.rdzv}")
        count = nodes(self.nnodes)
        if not self.rdzv_id.strip():
            raise LaunchError("--rdzv-id: it is empty; give a name, the same on each host")
        check_ranks(self.nproc)
        if self.max_restarts < 0:
            raise LaunchError(f"--max-restarts {self.max_restarts}: give 0 or more")
        if node is not None:
            if not 0 <= node < count:
                raise LaunchError(f"--node {node}: not one of --nnodes {self.nnodes}, of which the first is 0")
            if self.max_restarts:
                what = f"--max-restarts {self.max_restarts}"
                raise LaunchError(f"{what}: hosts that have numbers (--node) start nothing again; leave one out")
            master = (place["host"].strip("[]"), int(place["port"]))
            argv = static(args, nnodes=count, node=node, nproc=self.nproc, master=master, entry=entry)
            return here(argv, self.nproc, device, environ)
        argv = (
            *(sys.executable, *TORCHRUN, "--nnodes", str(count), "--nproc-per-node", str(self.nproc)),
            *("--rdzv-backend", "c10d", "--rdzv-id", self.rdzv_id, "--rdzv-endpoint", self.rdzv),
            *("--max-restarts", str(self.max_restarts)),
            *(*entry, *args),
        )
        rendered = here(argv, self.nproc, device, environ)
        # Agents would keep one store for their ranks, and count restarts each for itself: ranks of two hosts would look
        # for each other in different places of it. So rank 0 holds a store, which is new at each start.
        again = {OWN_STORE: "1", **fresh_since(args)} if self.max_restarts else {}
        return replace(rendered, sets=rendered.sets | again)


def here(argv: tuple[str, ...], nproc: int, device: Device, environ: Mapping[str, str]) -> Command:
    """Returns the command for this host, in an environment that no other launch has left anything in."""
    sets = {"OMP_NUM_THREADS": str(threads(nproc, environ))}
    sets |= device_env(choose_device(device, nproc, environ))
    kept = {*sets, VARIABLE, SINCE}  # a batch job was planned when it was submitted
    unsets = tuple(sorted(name for name in environ if is_stray(name) and name not in kept))
    return Command(argv, sets, unsets)


def node_number(word: str | None, environ: Mapping[str, str]) -> int | None:
    """Returns the number of this host that a word stands for, None where there is none.

    Raises:
        LaunchError: it is no number, or is to be Slurm's where Slurm says none.
    """
    if word is None:
        return None
    given = environ.get("SLURM_NODEID", "") if word == "slurm" else word
    if not re.fullmatch(r"\d{1,6}", given):
        raise LaunchError(f"--node {word}: not the number of a host" + " (no SLURM_NODEID here)" * (word == "slurm"))
    return int(given)


def nodes(word: str) -> int:
    """Returns the number of hosts that a word stands for.

    Raises:
        LaunchError: it is none. MIN:MAX, which torchrun would take, is refused: a run goes on with as many ranks alone
            as it was begun with.
    """
    if re.fullmatch(r"\d{1,6}", word) and int(word) > 0:
        return int(word)
    why = "a run has the same number of ranks from its beginning to its end" if ":" in word else "not a number of hosts"
    raise LaunchError(f"--nnodes {word}: {why}; give one number (NNODES=)")


def part_words(nnodes: str, node: int | None) -> list[str]:
    """Returns the words by which this host runs its part of a claim; the first one also judges.

    Raises:
        LaunchError: this host's part is not known.
    """
    most = nodes(nnodes)
    if most == 1 and node in (None, 0):
        return []
    if node is None:
        raise LaunchError(
            f"--node: none is given, and each host runs another part of a claim; give --node 0 to {most - 1}"
            ' (OPTIONS="--node 0" on the first host)'
        )
    if node >= most:
        raise LaunchError(f"--node {node}: not one of --nnodes {nnodes}, of which the first is 0")
    return ["--part", f"{node + 1}/{most}", *["--then-judge"] * (node == 0)]


def static(
    args: Sequence[str],
    *,
    nnodes: int,
    node: int,
    nproc: int,
    master: tuple[str, int],
    python: str = sys.executable,
    entry: Sequence[str] = ENTRY,
) -> tuple[str, ...]:
    """Returns what host number `node` of `nnodes` runs for its `nproc` ranks, which meet at `master`."""
    return (
        *(python, *TORCHRUN, "--nnodes", str(nnodes), "--node-rank", str(node), "--nproc-per-node", str(nproc)),
        *("--master-addr", master[0], "--master-port", str(master[1]), "--max-restarts", "0"),
        *(*entry, *args),
    )
