"""Processes below this one: found, signalled, ended. Nothing that a launch started may outlive it."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

SINK = b"normscale.tracking.mlflow_sink"  # ends by itself once it has replayed what is there
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PAUSE_S = 0.05


def adopt_orphans() -> None:
    """Makes processes whose parent died our children, so that they cannot get away."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(number: int = signal.SIGTERM) -> Callable[[], None] | None:
    """Returns what makes a child get a signal when this process is killed outright, where the system can do that.

    SIGUSR1 is ignored from the child on, until it asks for it: a scheduler sends it to every process of a job, and what
    starts ranks would die of it.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    return prepare


def end_descendants(wait_s: float = 5.0) -> None:
    """Ends what a launch left running, politely first. A sink is left alone."""
    for number, limit_s in ((signal.SIGTERM, wait_s), (signal.SIGKILL, max(wait_s, 1.0))):
        left = descendants(os.getpid())
        for pid in left:
            send(pid, number)
        deadline = time.monotonic() + limit_s
        while left and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
            _reap()
            left = descendants(os.getpid())
        if not left:
            return


def descendants(root: int) -> list[int]:
    """Returns the living processes below `root`, without sinks and what they started."""
    parents = _parents()
    found, generation = [], [root]
    while generation:
        generation = [pid for pid, parent in parents.items() if parent in generation and not _is_sink(pid)]
        found += generation
    return found


def children(parent: int) -> list[int]:
    """Returns the living processes that a process started itself."""
    return [pid for pid, above in _parents().items() if above == parent]


def send(pid: int, number: int) -> None:
    """Sends a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _parents() -> dict[int, int]:
    """Returns the parent of every living process."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue  # it ended meanwhile
            if state not in "ZX":
                parents[int(folder.name)] = int(parent)
    return parents


def _is_sink(pid: int) -> bool:
    try:
        return SINK in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
