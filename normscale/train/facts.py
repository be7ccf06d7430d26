"""What each rank says of itself before the first step, and the line that tells how two of them, or a plan, differ."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from normscale.planned import VARIABLE, Planned

MAY_DIFFER = (
    "hash",
    "world",
    "device_name",
    "threads",
)  # of a run's identity: rank 0's count; world is looked at first
SHORT = 80


@dataclass(frozen=True)
class Facts:
    """One rank; `error` is why it cannot train.

    Attributes:
        words: the hash of the command line and the configuration's file, None where there was no command line.
        settings: the whole configuration.
        parts: what the run's identity is made of.
        done: the exit code of the run if it is finished already, as far as this rank's host knows.
        fresh: whether the run is to begin anew, as far as this rank's host knows.
    """

    rank: int
    host: str
    world: int
    code: str
    torch: str
    words: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)
    run: str = ""
    done: int | None = None
    fresh: bool = False
    error: str | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def difference(came: Sequence[Facts], planned: Planned | None) -> str | None:
    """Returns how one of the ranks that have come so far differs from the plan or from the first; None: none does."""
    for facts in came:
        line = _from_plan(facts, planned) or _from_first(facts, came[0])
        if line is not None:
            return line
    return None


def other_hosts(everyone: Sequence[Facts], planned: Planned | None) -> str | None:
    """Returns the line that says which hosts were planned and which came, None where they are the same."""
    hosts = by_host(everyone)
    if planned is None or planned.hosts is None or set(planned.hosts) == hosts.keys():
        return None
    return (
        f"the ranks were planned for {', '.join(sorted(set(planned.hosts)))} and came from {', '.join(sorted(hosts))};"
        " start each host once, with the hosts of the plan"
    )


def missing(came: Sequence[Facts], world: int, limit_s: float, planned: Planned | None) -> str:
    """Returns the line that names who has not come in time, and who has, from where."""
    there = {facts.rank for facts in came}
    absent = ranks(rank for rank in range(world) if rank not in there)
    arrived = "; ".join(f"{ranks(own)} from {host}" for host, own in by_host(came).items())
    hosts = sorted(set(planned.hosts or ()) - by_host(came).keys()) if planned else []
    nobody = f"; nobody came from {', '.join(hosts)}" if hosts else ""
    return (
        f"{absent} of {world} had not come after {limit_s:g} s (engine.timeout_s); there came {arrived}{nobody};"
        " look at what is said there, or ask make doctor"
    )


def by_host(came: Sequence[Facts]) -> dict[str, list[int]]:
    """Returns the ranks of each host."""
    hosts: dict[str, list[int]] = {}
    for facts in came:
        hosts.setdefault(facts.host, []).append(facts.rank)
    return hosts


def ranks(numbers: Iterator[int] | Sequence[int]) -> str:
    """Returns e.g. "rank 3" or "ranks 0, 2, 3"."""
    words = [str(number) for number in numbers]
    return f"rank{'s' * (len(words) > 1)} {', '.join(words)}"


def _from_plan(facts: Facts, planned: Planned | None) -> str | None:
    if planned is None:
        return None
    if planned.world is not None and facts.world != planned.world:
        if facts.world == 1:
            return (
                f"{planned.world} ranks were planned ({VARIABLE}), but on {facts.host} a process was started by itself,"
                " without WORLD_SIZE, and would train alone; start it with python -m launch, or unset the variable"
            )
        return f"{facts} was started as one of {facts.world}, and {planned.world} were planned; start all ranks alike"
    if facts.code != planned.code:
        return (
            f"{facts} has other code than was launched (its sources hash to {facts.code}, those to {planned.code});"
            " bring every host to one commit (make doctor compares them)"
        )
    if facts.words is not None and facts.words != planned.config:
        return (
            f"{facts} reads another configuration than was launched: the file or the words after it differ there"
            f" ({facts.words}, launched was {planned.config}); give every host the same words and the same file"
        )
    return None


def _from_first(facts: Facts, first: Facts) -> str | None:
    if facts.world != first.world:
        return (
            f"{facts} was started as one of {facts.world}, and {first} as one of {first.world}; start all ranks alike"
        )
    if facts.code != first.code:
        return (
            f"{facts} has other code than {first} (sources {facts.code} and {first.code}); bring every host to one"
            " commit (make doctor compares them)"
        )
    if facts.torch != first.torch:
        return f"{facts} has PyTorch {facts.torch}, and {first} has {first.torch}; install the same on every host"
    if facts.error or first.error:  # what comes below may never have been looked at there
        return None
    ours, theirs = _flat(facts.settings), _flat(first.settings)
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            a, b = (str(each.get(key))[:SHORT] for each in (ours, theirs))
            return f"{key}: {a} on {facts} and {b} on {first}; give every rank the same configuration"
    for name in sorted((facts.parts.keys() | first.parts.keys()) - set(MAY_DIFFER)):
        a, b = (str(each.parts.get(name))[:SHORT] for each in (facts, first))
        if a != b and name == "data_digest":
            return f"data.source: the data on {facts} are not those on {first}; give every host the same files"
        if a != b:
            return f"{name} is {a} on {facts} and {b} on {first}; ranks of one run must not differ in it"
    return None


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
