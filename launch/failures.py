"""Which rank failed first, and why: from the status that each rank leaves, and from how its process ended."""

import json
import signal
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from normscale.arguments import LOST_RANK, STOPPED_ELSEWHERE

STOPPED = (128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Failure:
    """A rank that failed, its exit code, and its one line; `t` is when, in ns, if it could say so itself."""

    rank: int
    exit_code: int
    error: str
    killed: bool = False
    host: str = ""
    t: int = field(default=0, compare=False)

    @property
    def told(self) -> bool:
        """Returns whether the rank ended by itself, and rank 0 so that it said why."""
        return self.t != 0

    @property
    def stopped(self) -> bool:
        """Returns whether the rank only did as a signal told it."""
        return self.exit_code in STOPPED

    @property
    def stopped_elsewhere(self) -> bool:
        """Returns whether that signal came to another rank, of another host where none came to this one."""
        return self.stopped and self.error.startswith(STOPPED_ELSEWHERE)

    @property
    def followed(self) -> bool:
        """Returns whether another rank was the reason."""
        return self.error.startswith(LOST_RANK)

    def at(self, host: str) -> "Failure":
        """Returns the same failure with the host it was on."""
        return replace(self, host=host)

    def says(self) -> str:
        """Returns the line for a person."""
        if self.rank < 0:
            return f"{self.error}; the ranks of the other hosts were stopped"
        where = f" on {self.host}" if self.host else ""
        if self.told:
            return f"rank {self.rank}{where}: {self.error}"
        return f"rank {self.rank}{where} {self.error}; the other ranks were stopped"


def of_exit(rank: int, code: int) -> Failure:
    """Returns the failure of a rank that left no status, from the exit code of its process."""
    if code >= 0:
        return Failure(rank, code, f"ended with exit code {code}")
    why = " (out of memory?)" if code == -signal.SIGKILL else ""
    return Failure(rank, 1, f"was killed by {signal_name(-code)}{why}", killed=True)


def first_failure(folder: Path) -> Failure | None:
    """Returns the earliest failure that the ranks left a status of; rank 0's where it failed for the same reason."""
    return first_of(failures_in(folder))


def first_of(failures: Iterable[Failure]) -> Failure | None:
    """Returns the failure that the others followed from: one that was killed, then the earliest.

    A rank that was told to stop, or that lost another one, is never the reason where there is any other.
    """
    found = list(failures)
    if not found:
        return None
    first = min(found, key=lambda one: (not one.killed, one.followed, one.stopped, one.t))
    same = [one for one in found if (one.exit_code, one.error) == (first.exit_code, first.error)]
    return min(same, key=lambda one: one.rank)


def left_status(folder: Path, rank: int) -> bool:
    """Returns whether a rank came as far as to leave its exit code."""
    return (folder / f"rank{rank}.status").exists()


def could_not_tell(folder: Path) -> str | None:
    """Returns why a rank of a folder without a status could not leave one, None where it could have."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return "no space was left" if any(folder.glob("rank*.part")) else None


def failures_in(folder: Path) -> list[Failure]:
    """Returns the failures that the ranks left a status of, each rank its newest."""
    found = []
    for path in folder.glob("rank*.status"):
        status = json.loads(path.read_text(encoding="utf-8"))
        if status["exit_code"] != 0:
            found.append(Failure(status["rank"], status["exit_code"], status["error"], t=status["t"]))
    return found


def signal_name(number: int) -> str:
    """Returns SIGTERM for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
