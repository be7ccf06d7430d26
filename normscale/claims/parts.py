"""Parts of a claim's runs, each on a machine of its own, over a folder that they share.

Part I of N takes every N-th run, the dearest first, whatever is done already: so parts never meet at a run, and need no
lock for it. That two machines do not work on the same part, or on differently cut ones, a lease sees to: a file in the
shared folder that whoever works on a part touches every few seconds, and that says what it is cut from. It relies on
what any shared file system has, NFS included: creating a file fails where it is there, a rename is whole, and times of
files come from one clock. Locks (flock) are not relied on: on some shared folders each machine has its own.
"""

import json
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from normscale.claims.cost import Cost
from normscale.config.schema import RunConfig
from normscale.errors import BadInput, StoreError
from normscale.measures.config import MeasureConfig
from normscale.tracking.files import write_whole

FOLDER = "claims/parts"
BEAT_S = 5.0
STALE_S = 60.0  # a holder that has not touched its lease for so long is gone

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """The I-th of N parts; I counts from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def share(self, runs: Sequence[tuple[T, RunConfig | MeasureConfig]]) -> list[T]:
        """Returns this part of the runs: every N-th by what they cost, dearest first, the same on every machine."""
        cost = Cost()  # not this machine's own, which would cut differently
        dearest = sorted(runs, key=lambda run: -cost.of(run[1]))  # stable: of like cost, as the claim has them
        return [run for run, _ in dearest[self.number - 1 :: self.of]]


def part(word: str) -> Part:
    """Returns the part that `I/N` names.

    Raises:
        BadInput: there is no such part.
    """
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", word)
    if found is None:
        raise BadInput(f"--part {word}: a part is I/N, as in 1/2 and 2/2")
    number, of = int(found[1]), int(found[2])
    if not 1 <= number <= of:
        raise BadInput(f"--part {word}: parts count from 1 to {of}; give one of 1/{of} ... {of}/{of}")
    return Part(number, of)


@contextmanager
def leased(runs: Path, ids: Iterable[str], profile: str, part: Part) -> Iterator[None]:
    """Holds the part of each claim for the block, so that no other process, here or elsewhere, works on it.

    Raises:
        BadInput: somebody does, or works on parts that are cut differently.
        StoreError: the folder cannot be written.
    """
    folder, over = runs / FOLDER, threading.Event()
    held: list[Path] = []
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for claim in ids:
                mine = _lease(runs, claim, profile, part)
                _take(mine)
                held.append(mine)
                _refuse_others(runs, claim, profile, part)
        except OSError as error:
            raise StoreError(
                f"{folder}: cannot be written ({error.strerror}); choose another folder for the runs"
            ) from None
        threading.Thread(target=_beat, args=(held, over), daemon=True).start()
        yield
    finally:
        over.set()
        for path in held:
            with suppress(OSError):
                if _who(path) == _we():
                    path.unlink()


def agree(runs: Path, ids: Iterable[str], profile: str, part: Part, cut: Mapping[str, str]) -> None:
    """Says in the leases of a part what it is cut from, and refuses it where another part at work is of other runs.

    `cut` is that of `cut_of`: a digest of all `runs`, and what may be the cause where they differ. Runs
    are named by all that their numbers depend on, the machine's kind included: parts cut from others leave some out.

    Raises:
        BadInput: another part is cut from other runs; the message says in what the two differ.
        StoreError: the folder cannot be written.
    """
    try:
        for claim in ids:
            mine = _lease(runs, claim, profile, part)
            if _who(mine) == _we():
                write_whole(mine, json.dumps([*_we(), dict(cut)]))
            for other, holder in _held(runs, claim, profile):
                theirs = _cut(_lease(runs, claim, profile, other)) or cut
                if theirs.get("runs") == cut["runs"]:
                    continue
                keys = [key for key in cut if theirs.get(key) != cut[key]]
                differ = ", ".join(f"{key} {cut[key]} here and {theirs.get(key)} there" for key in keys)
                raise BadInput(
                    f"claim {claim}: {holder} has cut part {other} from other runs than these: {differ}; start all"
                    " parts with the same words, sources and data, on machines of one kind"
                )
    except OSError as error:
        raise StoreError(
            f"{runs / FOLDER}: cannot be written ({error.strerror}); choose another folder for the runs"
        ) from None


def refuse_while_leased(runs: Path, ids: Iterable[str], profile: str) -> None:
    """Refuses to run and judge claims as a whole while parts of them are at work.

    Raises:
        BadInput: it names who works on what.
    """
    for claim in ids:
        _refuse_others(runs, claim, profile, None)


def at_work(runs: Path, ids: Iterable[str], profile: str) -> str | None:
    """Returns who works on a part of one of the claims, None where nobody does."""
    held = next((held for claim in ids for held in _held(runs, claim, profile)), None)
    return held and f"{held[1]}, part {held[0]}"


def _refuse_others(runs: Path, claim: str, profile: str, part: Part | None) -> None:
    for other, holder in _held(runs, claim, profile):
        if part is not None and other.of == part.of:
            continue
        wish = "wait for it" if part is None else f"wait for it, or cut it as that: --part I/{other.of}"
        raise BadInput(f"claim {claim}: {holder} works on part {other} of its runs; {wish}")


def _lease(runs: Path, claim: str, profile: str, part: Part) -> Path:
    return runs / FOLDER / f"{claim}-{profile}-{part.number}-of-{part.of}.json"


def _held(runs: Path, claim: str, profile: str) -> Iterator[tuple[Part, str]]:
    """Gives the parts of a claim that somebody works on, and who does."""
    for path in sorted((runs / FOLDER).glob(f"{claim}-{profile}-*-of-*.json")):
        found = re.fullmatch(re.escape(f"{claim}-{profile}-") + r"(\d+)-of-(\d+)\.json", path.name)
        if found is not None and (holder := _holder(path)) is not None:
            yield Part(int(found[1]), int(found[2])), holder


def _take(path: Path) -> None:
    """Creates a lease, or takes over one whose holder is gone."""
    for _ in range(3):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            if (holder := _holder(path)) is not None:
                number, _, of = path.stem.rsplit("-", 3)[1:]
                raise BadInput(f"--part {number}/{of}: {holder} works on it; wait for it, or take another") from None
            with suppress(FileNotFoundError):  # whoever renames it first may take it
                gone = path.with_suffix(f".gone-{socket.gethostname()}-{os.getpid()}")
                path.rename(gone)
                if _holder(gone) is not None:  # somebody else has taken it over since we looked
                    with suppress(FileExistsError):
                        os.link(gone, path)
                gone.unlink()
            continue
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(_we(), file)
        return
    raise BadInput(f"{path}: others take this lease again and again; look at who starts this part")


def _holder(path: Path) -> str | None:
    """Returns who holds a lease, None where nobody does any more."""
    try:
        age, found = _now(path.parent) - path.stat().st_mtime, _who(path)
    except FileNotFoundError:
        return None
    if age > STALE_S:
        return None
    if found is None:  # it is being written
        return "another process"
    host, pid = found
    gone = host == socket.gethostname() and not Path(f"/proc/{pid}").exists()
    return None if gone else f"process {pid} on {host}"


def _we() -> list[str]:
    return [socket.gethostname(), str(os.getpid())]


def _who(path: Path) -> list[str] | None:
    """Returns host and process that a lease names."""
    found = _read(path)[:2]
    return found if len(found) == 2 and all(isinstance(word, str) for word in found) else None


def _cut(path: Path) -> dict[str, str] | None:
    """Returns what the holder of a lease has cut its part from; None where it has not said so yet, or is gone."""
    try:
        found = _read(path)[2:]
    except FileNotFoundError:
        return None
    return found[0] if found and isinstance(found[0], dict) else None


def _read(path: Path) -> list[Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return []
    return found if isinstance(found, list) else []


def _now(folder: Path) -> float:
    """Returns the time by the clock that the folder's file times come from."""
    path = folder / f".now-{socket.gethostname()}-{os.getpid()}"
    try:
        path.write_bytes(b"")
        return path.stat().st_mtime
    finally:
        path.unlink(missing_ok=True)


def _beat(held: list[Path], over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        for path in held:
            with suppress(OSError):
                os.utime(path)
