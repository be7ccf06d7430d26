"""A hostfile, as MPI and DeepSpeed have it: `host slots=N` a line, `#` comments, blank lines.

A hostfile that is named but missing, empty or wrong ends the launch: training on this machine alone, because a name was
misspelt, is what nobody wants.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.command import MOST_RANKS
from normscale.errors import LaunchError, nearest

_HOST = re.compile(r"([A-Za-z0-9_.][A-Za-z0-9_.-]*@)?[A-Za-z0-9_:\[][A-Za-z0-9_.:%\[\]-]*")
_SLOTS = re.compile(r"slots=([0-9]{1,6})")
ENDS = 4  # of a long list of hosts


@dataclass(frozen=True)
class Host:
    """A host to start ranks on; `place` is where it is named, as in hosts:3."""

    name: str
    slots: int
    place: str = ""

    @property
    def machine(self) -> str:
        """Returns its name without the user, as names of hosts are compared."""
        return self.name.rpartition("@")[2].lower().rstrip(".")

    @property
    def where(self) -> str:
        """Returns " (hosts:3)", for the end of a message."""
        return f" ({self.place})" if self.place else ""


def read_hosts(path: Path, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Host]:
    """Returns the hosts of a hostfile in its order: all, those of `include`, or those not of `exclude`.

    Raises:
        LaunchError: no such file, no host in it, a line that says something else, or a name that is not in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise LaunchError(f"{path}: no such hostfile; write one: a line 'HOST slots=RANKS' for each host") from None
    except UnicodeDecodeError:
        raise LaunchError(f"{path}: not UTF-8 text; a hostfile has lines 'HOST slots=RANKS'") from None
    except (OSError, ValueError) as error:
        raise LaunchError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return select(parse(text, str(path)), include, exclude, str(path))


def parse(text: str, name: str = "hostfile") -> list[Host]:
    """Returns the hosts of a hostfile's text; `name` is what messages call it."""
    found: dict[str, Host] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        words = line.partition("#")[0].split()
        place = f"{name}:{number}"
        if not words:
            continue
        host = _host(words, line.strip(), place)
        if first := found.get(host.machine):
            raise LaunchError(
                f"{place}: {host.name} is there twice, first in line {first.place.rpartition(':')[2]}; "
                "write it once, with all its slots"
            )
        found[host.machine] = host
    if not found:
        raise LaunchError(f"{name}: no host in this hostfile; write a line 'HOST slots=RANKS' for each host")
    return list(found.values())


def select(hosts: Sequence[Host], include: Sequence[str], exclude: Sequence[str], name: str) -> list[Host]:
    """Returns the hosts that `include` or `exclude` leaves, in their order."""
    if include and exclude:
        raise LaunchError("--include and --exclude: both are given; give the shorter one")
    known = [host.name for host in hosts]
    for option, words in (("--include", include), ("--exclude", exclude)):
        for word in words:
            if word not in known:
                raise LaunchError(f"{option} {word}: not a host of {name}{nearest(word, known)}")
    left = [host for host in hosts if (host.name in include if include else host.name not in exclude)]
    if not left:
        raise LaunchError(f"--exclude: no host of {name} is left; exclude fewer")
    return left


def _host(words: list[str], line: str, place: str) -> Host:
    shown = line if len(line) <= 100 else f"{line[:100]}..."
    slots = _SLOTS.fullmatch(words[1]) if len(words) == 2 else None
    if slots is None or not _HOST.fullmatch(words[0]):
        raise LaunchError(f"{place}: {shown!r} is not 'HOST slots=RANKS', as in: node1 slots=4")
    if int(slots[1]) == 0:
        raise LaunchError(f"{place}: {shown!r} has no slot; give it one a rank, or take the line out")
    if int(slots[1]) > MOST_RANKS:
        raise LaunchError(f"{place}: {shown!r} has too many slots; at most {MOST_RANKS} ranks on a host")
    return Host(words[0], int(slots[1]), place)


def few(names: Sequence[str]) -> str:
    """Returns the names in a line, of many the first and the last ones."""
    return ", ".join(names if len(names) <= 2 * ENDS else [*names[:ENDS], "...", *names[-ENDS:]])


def ranks_of(hosts: Sequence[Host]) -> str:
    """Returns e.g. "3 ranks on 2 hosts (n0 x 1, n1 x 2)"."""
    count = sum(host.slots for host in hosts)
    listed = few([f"{host.name} x {host.slots}" for host in hosts])
    return f"{count} rank{'s' * (count != 1)} on {len(hosts)} host{'s' * (len(hosts) != 1)} ({listed})"
