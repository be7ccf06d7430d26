"""Training jobs as a person starts them, with `make` on a host; and what must hold of them, whoever started them."""

import base64
import hashlib
import json
import re
import shlex
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normscale.tracking.reader import RunRecord, read_run
from tests.cluster.common import ROOT, wait_until
from tests.cluster.handle import Host, Started
from tests.cluster.hosts import Cluster

CONFIG = "configs/train/quick.yaml"
STEPS = 300
TIMEOUT_S = 10  # of ranks that wait for each other

# Plain sums and products, so that what differs by rounding stays close; momentum, so that there is a state to lose.
SMALL = (
    "model.d=16",
    "model.context=32",
    "data.max_bytes=60_000",
    "train.batch=8",
    "train.eval_batches=1",
    "train.optim.name=sgd",
    "train.optim.lr=0.05",
    "train.optim.momentum=0.9",
    "probes.every=20",
    "probes.profiles=false",
    "checkpoint.every=20",
    f"engine.timeout_s={TIMEOUT_S}",
)


def words(runs: Path, *more: str, steps: int = STEPS, uri: str = "null") -> list[str]:
    """Returns the settings of a small run; `more` comes last and so wins."""
    return [*SMALL, f"train.steps={steps}", f"tracking.uri={uri}", f"tracking.runs={runs}", *more]


def make(host: Host, target: str, args: Sequence[str], *settings: str, env: Mapping[str, str] | None = None) -> Started:
    """Starts `make TARGET` on a host, as after a login there; what is installed is taken as it is."""
    given = [f"CONFIG={CONFIG}", f"ARGS={shlex.join(args)}", *settings]
    return host.start("make", "-o", ".venv/installed", target, *given, env={"OMP_NUM_THREADS": "1", **(env or {})})


def hostfile(cluster: Cluster, slots: int = 1) -> Path:
    """Writes the cluster's hostfile."""
    path = cluster.shared / "hostfile"
    path.write_text("".join(f"{host.name} slots={slots}\n" for host in cluster))
    return path


def folder_of(runs: Path) -> Path:
    """Returns the folder of the only run."""
    folders = [path for path in runs.iterdir() if (path / "spool.jsonl").exists()] if runs.exists() else []
    assert len(folders) == 1, f"{len(folders)} runs in {runs}"
    return folders[0]


def checkpoints(runs: Path) -> list[int]:
    """Returns the steps of the complete checkpoints of all runs of a folder, rising."""
    found = [re.search(r"step-(\d+)/complete$", str(path)) for path in runs.glob("*/checkpoints/step-*/complete")]
    return sorted(int(match[1]) for match in found if match)


def wait_for_step(runs: Path, step: int, running: Iterable[Started] = (), limit_s: float = 60) -> None:
    """Waits for a checkpoint of this step or a later one; what runs meanwhile must not end."""
    started = list(running)

    def there() -> bool:
        for one in started:
            assert one.running(), f"ended before step {step}:\n{one.out}\n{one.err}"
        return any(found >= step for found in checkpoints(runs))

    said = "".join(one.out + one.err for one in started) if not wait_until(there, limit_s) else None
    assert said is None, f"no step {step} within {limit_s} s:\n{said}"


def statuses(folder: Path) -> dict[int, dict[str, Any]]:
    """Returns what each rank has left beside the records."""
    return {int(path.stem.removeprefix("rank")): json.loads(path.read_text()) for path in folder.glob("rank*.status")}


def events(record: RunRecord, *kinds: str) -> list[dict[str, Any]]:
    """Returns the events of some kinds."""
    return [event for event in record.events if event["event"] in kinds]


@dataclass(frozen=True)
class Well:
    """A run that ended well: its records, and the digest of its weights that all its ranks agree on."""

    record: RunRecord
    weights: str

    @property
    def losses(self) -> list[float]:
        """The training losses that were recorded."""
        return self.record.series["loss_train"].values

    @property
    def last(self) -> float:
        """The held-out loss at the end."""
        return self.record.series["loss_val"].values[-1]


def ended_well(runs: Path, hosts: Sequence[str], engine: str = "ddp", steps: int = STEPS) -> Well:
    """Returns the only run, which must have ended well on just these hosts, one entry a rank, with equal weights."""
    folder = folder_of(runs)
    record, left = read_run(folder), statuses(folder)
    assert record.end is not None
    assert (record.end["outcome"], record.end["exit_code"]) == ("finished", 0)
    assert record.summary["steps"] == record.summary["applied"] == steps
    assert record.start["engine"] == engine
    assert record.start["identity"]["world"] == len(hosts)
    assert sorted(left) == list(range(len(hosts)))
    assert [left[rank]["host"] for rank in sorted(left)] == list(record.start["hosts"]) == list(hosts)
    assert {(one["exit_code"], one["world"], one["engine"]) for one in left.values()} == {(0, len(hosts), engine)}
    digests = {one["weights"] for one in left.values()}
    assert len(digests) == 1, left
    assert checkpoints(runs)[-1] == steps
    return Well(record, digests.pop())


@dataclass
class Watch:
    """Notes every command line that is seen on the hosts while it is open."""

    cluster: Cluster
    every_s: float = 0.05
    seen: dict[str, set[tuple[str, ...]]] = field(default_factory=dict)

    def __enter__(self) -> "Watch":
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(self.every_s):
            for name, processes in self.cluster.processes().items():
                self.seen.setdefault(name, set()).update(process.argv for process in processes)

    def holding(self, secret: str) -> list[str]:
        """Returns the command lines that hold a secret, plain or in base64."""
        lines = {" ".join(argv) for seen in self.seen.values() for argv in seen}
        return [line for line in lines if any(text in line for text in disguises(secret))]

    def ranks(self, name: str) -> list[list[str]]:
        """Returns what stood after `normscale train` on a host."""
        marks = [(argv, _after_train(argv)) for argv in self.seen.get(name, ())]
        return [list(argv[mark:]) for argv, mark in marks if mark]


def _after_train(argv: tuple[str, ...]) -> int:
    """Returns where the arguments begin, if this is the process of a rank: `python [-u] -m normscale train ...`."""
    mark = 2 if argv[1:2] == ("-u",) else 1
    return mark + 3 if argv[mark : mark + 3] == ("-m", "normscale", "train") else 0


def files_with(secret: str, folders: Iterable[Path]) -> list[str]:
    """Returns the files below some folders that hold a secret, plain or in base64."""
    found, texts = [], [text.encode() for text in disguises(secret)]
    for folder in folders:
        for path in folder.rglob("*"):
            try:
                ours = str(ROOT) in str(path)  # a checkout below /tmp is on every host
                data = path.read_bytes() if path.is_file() and not path.is_symlink() and not ours else b""
                found += [str(path)] if any(text in data for text in texts) else []
            except OSError:
                continue
    return found


def launcher_on(host: Host, name: str) -> int:
    """Returns the process of a launcher that runs on a host."""
    found = [process for process in host.processes() if process.argv[1:4] == ("-m", "launch", name)]
    assert len(found) == 1, [process.line for process in host.processes()]
    return found[0].pid


def rank_on(host: Host, limit_s: float = 5.0) -> int:
    """Returns the process of the only rank that runs on a host."""
    found: list[int] = []

    def there() -> bool:
        found[:] = [process.pid for process in host.processes() if _after_train(process.argv)]
        return len(found) == 1

    assert wait_until(there, limit_s), [process.line for process in host.processes()]
    return found[0]


def whole(runs: Path) -> list[int]:
    """Returns the steps of the complete checkpoints of the only run, each of whose files must be what was written."""
    steps = checkpoints(runs)
    for step in steps:
        folder = folder_of(runs) / "checkpoints" / f"step-{step:08d}"
        text = (folder / "index.json").read_bytes()
        assert hashlib.sha256(text).hexdigest() == (folder / "complete").read_text()
        for name, file in json.loads(text)["files"].items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == file["sha256"], folder / name
    return steps


def disguises(secret: str) -> list[str]:
    """Returns the secret as it stands in a text, and in base64 at each of the three places a byte may have."""
    found = [secret]
    for before in range(3):
        coded = base64.b64encode(b" " * before + secret.encode()).decode()
        length = before + len(secret.encode())
        found.append(coded[-(-before * 4 // 3) : length * 4 // 3])  # the letters that hold bits of the secret alone
    return found
