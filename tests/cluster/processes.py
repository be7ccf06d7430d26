"""What runs on a host, read from outside."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process of a host: its number as seen from outside, its parent's, its state, start and arguments."""

    pid: int
    parent: int
    state: str
    started: int
    argv: tuple[str, ...]

    @property
    def line(self) -> str:
        """Its arguments, as one line."""
        return " ".join(self.argv)


def namespace_of(pid: int) -> str | None:
    """Returns the pid namespace of a process; None once it is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def running_in(namespaces: set[str]) -> dict[str, list[Process]]:
    """Returns the living processes of each of some pid namespaces, in one look at /proc."""
    found: dict[str, list[Process]] = {name: [] for name in namespaces}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        own = namespace_of(int(entry.name))
        if own in found and (process := _read(int(entry.name))) is not None:
            found[own].append(process)
    return found


def _read(pid: int) -> Process | None:
    folder = Path("/proc", str(pid))
    try:
        name, _, rest = (folder / "stat").read_text().rpartition(")")
        words = rest.split()
        argv = tuple(word.decode(errors="replace") for word in (folder / "cmdline").read_bytes().split(b"\0"))
    except OSError:
        return None
    if words[0] in "ZX":
        return None
    if argv and not argv[-1]:
        argv = argv[:-1]
    return Process(pid, int(words[1]), words[0], int(words[19]), argv or (f"[{name.partition('(')[2]}]",))
