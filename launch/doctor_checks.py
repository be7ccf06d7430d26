"""What the doctor makes of the hosts' answers: problems, each a line with its mend, and the table. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.hostfile import Host

CLOCK_S = 1.0  # records of one run are put in order by the clocks of its hosts
LEAST_SHM = 256 << 20  # containers have 64 MB; NCCL and shared tensors want more
LEAST_FREE = 1 << 30
LEAST_FILES = 1024
LEAST_PYTHON = (3, 11)
NEEDED = ("torch", "numpy", "pydantic", "omegaconf", "safetensors", "datasets", "accelerate")
COMPARED = (*NEEDED, "deepspeed", "transformers", "mlflow", "triton")


@dataclass
class Seen:
    """A host and what is known of it; `gone` is why it does not answer."""

    host: Host
    gone: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    clock: tuple[float, float] | None = None
    names: dict[str, list[str]] = field(default_factory=dict)
    paths: list[dict[str, Any]] = field(default_factory=list)
    unreached: dict[str, str] = field(default_factory=dict)
    shared: dict[str, bool] = field(default_factory=dict)  # by key: whether it sees what the first host wrote

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def address(self) -> str:
        """The name without a user."""
        return self.name.rpartition("@")[2]


def problems(hosts: Sequence[Seen], sharing: Sequence[str] = ()) -> list[str]:
    """Returns what is wrong, a line each; `sharing` are the keys of folders that all hosts must have in common."""
    found = [f"{seen.name}: {seen.gone}{seen.host.where}" for seen in hosts if seen.gone]
    there = [seen for seen in hosts if not seen.gone]
    if not there:
        return found
    first = there[0]
    for seen in there:
        found += [f"{seen.name}: {line}" for line in (*_alone(seen), *_beside(seen, first))]
        if len(hosts) > 1:
            found += [f"{seen.name}: {line}" for line in _network(seen, [one.address for one in hosts if one.gone])]
        found += [f"{seen.name}: {line}" for line in _paths(seen, first, sharing)]
    return found + _twins(there)


def table(hosts: Sequence[Seen]) -> list[str]:
    """Returns a row for each host, below what the columns are."""
    head = ["host", "python", "torch", "code", "clock", "cores", "memory", "gpus", "/dev/shm", "free for runs"]
    rows = [head, *(_row(seen) for seen in hosts)]
    widths = [max(len(row[i]) for row in rows if len(row) > i) for i in range(len(head))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


def _row(seen: Seen) -> list[str]:
    if seen.gone:
        return [seen.name, "no answer"]
    facts = seen.facts
    gpus = facts["gpus"]
    kinds = ", ".join(sorted({f"{gpu['name']} {_bytes(gpu['bytes'])}" for gpu in gpus}))
    offset = "-" if seen.clock is None else f"{seen.clock[0]:+.3f} s ±{seen.clock[1]:.3f}"
    runs = next((path for path in seen.paths if path["write"]), None)
    return [
        seen.name,
        facts["python"],
        facts["packages"].get("torch") or "-",
        facts["commit"] or facts["code"] or "-",
        offset,
        str(facts["cores"]),
        _bytes(facts["memory"]),
        f"{len(gpus)} x {kinds}" if gpus else "0",
        _bytes((facts["shm"] or {}).get("all")),
        _bytes((runs or {}).get("free")),
    ]


def _alone(seen: Seen) -> list[str]:
    """Returns what is wrong with a host whatever the others are."""
    facts, found = seen.facts, []
    packages, gpus, limits = facts["packages"], facts["gpus"], facts["limits"]
    if tuple(map(int, facts["python"].split(".")[:2])) < LEAST_PYTHON:
        found.append(f"Python {facts['python']} is too old; install 3.11 or newer, or name it with --remote-python")
    if missing := [name for name in NEEDED if not packages.get(name)]:
        found.append(f"{', '.join(missing)} not installed; run make test there, or name its Python: --remote-python")
    if facts["code"] is None:
        found.append("no checkout of normscale in the folder; name it with --remote-dir")
    if gpus and (packages.get("torch") or "").endswith("+cpu"):
        found.append(f"{len(gpus)} GPU(s), and PyTorch {packages['torch']} cannot use them; make test TORCH_INDEX=URL")
    if gpus and seen.host.slots > len(gpus):
        found.append(f"slots={seen.host.slots} and {len(gpus)} GPU(s), one a rank; lower the slots{seen.host.where}")
    if not gpus and seen.host.slots > facts["cores"]:
        found.append(f"slots={seen.host.slots} and {facts['cores']} core(s); lower the slots{seen.host.where}")
    shm = facts["shm"]
    if shm is None or shm["all"] < LEAST_SHM:
        mend = "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm"
        found.append(f"/dev/shm has {_bytes((shm or {}).get('all'))}; ranks of one host want more: {mend}")
    if limits["NOFILE"] is not None and limits["NOFILE"] < LEAST_FILES:
        found.append(f"{limits['NOFILE']} open files are allowed (ulimit -n); raise it to 4096 in limits.conf")
    if facts["infiniband"] and limits["MEMLOCK"] is not None:
        found.append("InfiniBand needs unlimited locked memory (ulimit -l unlimited in limits.conf)")
    if seen.clock is not None and abs(seen.clock[0]) - seen.clock[1] > CLOCK_S:
        ahead = "ahead of" if seen.clock[0] > 0 else "behind"
        by = f"{abs(seen.clock[0]):.1f} s (±{seen.clock[1]:.1g})"
        found.append(f"its clock is {by} {ahead} this machine's; start an NTP service on both (chrony)")
    return found


def _beside(seen: Seen, first: Seen) -> list[str]:
    """Returns how a host differs from the first."""
    here, there, found = seen.facts, first.facts, []
    if here["python"] != there["python"]:
        found.append(f"Python {here['python']}, and {first.name} has {there['python']}; use the same")
    other = [
        f"{name} {here['packages'][name] or 'none'} (there {there['packages'][name] or 'none'})"
        for name in COMPARED
        if here["packages"][name] != there["packages"][name]
    ]
    if other:
        found.append(f"other packages than {first.name}: {', '.join(other)}; install from constraints.txt on both")
    if here["code"] != there["code"]:
        commits = f"{here['commit'] or here['code']}, there {there['commit'] or there['code']}"
        found.append(f"other sources than {first.name} ({commits}); bring both to one commit, or copy the folder")
    if len(here["gpus"]) != len(there["gpus"]) or _kinds(here) != _kinds(there):
        pair = f"{len(here['gpus'])} GPU(s) {_kinds(here)}, {first.name} {len(there['gpus'])} {_kinds(there)}"
        found.append(f"other GPUs: {pair}; ranks wait for the slowest".replace(" []", ""))
    return found


def _network(seen: Seen, gone: Sequence[str]) -> list[str]:
    found = []
    own = seen.names.get(seen.facts["host"], [])
    if own and all(_loops(address) for address in own):
        found.append(
            f"its own name, {seen.facts['host']}, is {own[0]} there, where no other host finds its ranks; give the name"
            " its network address in /etc/hosts"
        )
    for name, addresses in seen.names.items():
        if not addresses and name not in gone:
            found.append(f"does not know the name {name}; add it to /etc/hosts or to DNS")
    found += [
        f"cannot connect to {name} ({why}); open the firewall between them" for name, why in seen.unreached.items()
    ]
    return found


def _paths(seen: Seen, first: Seen, sharing: Sequence[str]) -> list[str]:
    found = []
    sizes = {path["key"]: path.get("bytes") for path in first.paths}
    for path in seen.paths:
        key, where = path["key"], path["path"]
        if path["wrong"]:
            mend = "choose another folder" if path["write"] else "copy it there, or share its folder"
            found.append(f"{key}: {where}: {path['wrong']}; {mend}")
        elif path["write"]:
            if path["free"] is not None and path["free"] < LEAST_FREE:
                found.append(f"{key}: {where} has {_bytes(path['free'])} left; free some space")
            if key in sharing and not seen.shared.get(key, True):
                found.append(
                    f"{key}: {where} is not the folder that {first.name} has by that name, and checkpoints need one"
                    " for all hosts; choose a shared one"
                )
        elif path["bytes"] != sizes.get(key):
            found.append(
                f"{key}: {where} has {path['bytes']} bytes, on {first.name} {sizes.get(key)}; copy it from there"
            )
    return found


def _twins(there: Sequence[Seen]) -> list[str]:
    """Returns which names stand for one machine, or which machines share a name."""
    found, seen_before = [], dict[str, Seen]()
    for seen in there:
        host = seen.facts["host"]
        other = seen_before.setdefault(host, seen)
        if other is seen:
            continue
        one = other.facts["boot"] == seen.facts["boot"]
        mend = "name it once, with all its slots" if one else "give each its own (hostnamectl)"
        what = "are one machine" if one else "are two machines that both call themselves"
        found.append(f"{seen.name}: {other.name} and it {what} {host}; {mend}{seen.host.where}")
    return found


def _kinds(facts: Mapping[str, Any]) -> list[str]:
    return sorted({f"{gpu['name']} {_bytes(gpu['bytes'])}" for gpu in facts["gpus"]})


def _loops(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _bytes(count: int | None) -> str:
    if count is None:
        return "-"
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"
