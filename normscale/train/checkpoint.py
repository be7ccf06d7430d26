"""Checkpoints: all that a run needs to go on as if it had never stopped, in safetensors and JSON; nothing is unpickled.

    checkpoints/step-00000120/
        rank0.safetensors   what all ranks share (weights, optimizer state, ...) and what is rank 0's own
        rank1.safetensors   what is rank 1's own (its random state, its part of what is sharded), and so on
        index.json          format, identity, step, ranks, plain values; of each file its size, hash and tensors
        complete            the hash of index.json, written last

Where the engine shards the weights, each rank's file has its own part of them and of the optimizer's state: of every
parameter the entries that the rank holds, a stretch of the flattened whole in the order of ranks (see `wholes`).

All is written in a folder with the ending .part, which gets its name when every rank has written. What is found later
is used only if it is complete, unchanged, of this very run and of the shapes of the model at hand; else it is passed
over.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from normscale.tracking.files import read_regular
from normscale.train.engines.engine import Engine

FORMAT = 2  # 1: without the engine's name, and before there were parts of weights
FOLDER, INDEX, COMPLETE = "checkpoints", "index.json", "complete"
PART = ".part"
DESCRIBED = ".described"  # of each rank's file, for rank 0, until the index holds it
OWN = "own"

State = Mapping[str, Any]
"""Nested dicts of tensors and plain values (what JSON holds; floats may be NaN or infinite). What stands below a key
`own` is this rank's and holds tensors only; all else is the same on every rank."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that can be used: where it lies, the steps it was made after, and what it holds.

    `records` are the attempts that led to it, each with its last step with metrics at that time.
    """

    path: Path
    step: int
    state: State
    records: tuple[tuple[int, int], ...] = ()


class Unusable(Exception):
    """Why a checkpoint cannot be used."""


class Checkpoints:
    """The checkpoints of one run. All ranks call each method together, and all get the same answer.

    Args:
        run_dir: the folder of the run, the same on every rank.
        identity: the hash of all that the run's numbers depend on.
        keep: how many of the newest are kept.
    """

    def __init__(self, run_dir: Path, identity: str, engine: Engine, keep: int) -> None:
        self.root, self.identity, self.engine, self.keep = run_dir / FOLDER, identity, engine, keep
        self._passed_over: set[int] = set()
        self._records: tuple[tuple[int, int], ...] = ()  # of the attempts that this one goes on from

    def path(self, step: int) -> Path:
        """Returns the folder of the checkpoint made after `step`."""
        return self.root / f"step-{step:08d}"

    def save(self, step: int, attempt: int, last: int, state: State) -> str | None:
        """Writes a checkpoint, then removes those that are no longer kept; returns why it could not, or None.

        `last` is the newest step with metrics of this attempt. Whatever fails, the checkpoints that were there stay.
        """
        part = self.root / (self.path(step).name + PART)
        tensors, plain = split(state)
        if self.engine.rank:
            tensors = {name: tensor for name, tensor in tensors.items() if _own(name)}
        index = {"format": FORMAT, "identity": self.identity, "run": self.root.parent.name, "step": step}
        index |= {"records": [*self._records, (attempt, last)], "world": self.engine.world}
        index |= {"engine": self.engine.name, "plain": _strict(plain)}

        def prepare() -> None:
            if os.path.lexists(self.root) and not self.root.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{self.root} is not a folder; move it away")
            for stale in self.root.glob(f"*{PART}"):
                _remove(stale)
            part.mkdir(parents=True)

        failed = (
            self._all(prepare if self.engine.rank == 0 else None)
            or self._all(lambda: self._write(part, tensors))
            or self._all((lambda: self._finish(part, index)) if self.engine.rank == 0 else None)
        )
        if failed and self.engine.rank == 0:
            with suppress(OSError):
                _remove(part)
        return failed

    def newest(
        self, reached: Mapping[int, int], wanted: State, late: Mapping[str, Tensor], tell: Callable[[Path, str], None]
    ) -> Found | None:
        """Returns the newest checkpoint that every rank can use, or None; `tell` gets each one passed over, and why.

        `reached` {attempt: its last step with metrics} is of the attempts whose records are at hand: weights that go on
        from others would leave a gap in the records.
        `wanted` is the state at hand, whose names, types and shapes a checkpoint must have; `late` names the tensors
        that it may have besides. Rank 0 says which ones there are.
        """
        steps = iter(self._steps() if self.engine.rank == 0 else ())
        if self.engine.rank == 0:
            for part in sorted(self.root.glob(f"step-*{PART}")):
                tell(part, "it was not written to its end")
        while step := self.engine.count(next(steps, 0)):
            found = reason = None
            try:
                found = self._read(step, reached)
                _check_fit(found.state, wanted, late)
            except Unusable as error:
                reason = str(error)
            if not self.engine.count(int(reason is not None)):
                self._records = found.records if found is not None else ()
                return found
            self._passed_over.add(step)
            if self.engine.rank == 0:
                tell(self.path(step), reason or "another rank cannot use it")
        return None

    def pass_over(self) -> None:
        """Passes over all that are there, for a run that begins anew; its first own checkpoint removes them."""
        self._passed_over.update(self._steps())

    def clean(self) -> None:
        """Removes what was passed over, for a run that has ended."""
        if self.engine.rank == 0:
            for step in self._passed_over.intersection(self._steps()):
                with suppress(OSError):  # the records tell that it is not to be used
                    _remove(self.path(step))

    def _all(self, stage: Callable[[], None] | None) -> str | None:
        """Runs one stage of writing and waits for the other ranks; returns why it failed on any of them, or None."""
        reason = None
        try:
            if stage is not None:
                stage()
        except (OSError, SafetensorError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        failed = self.engine.count(int(reason is not None))
        return reason or ("another rank could not write" if failed else None)

    def _write(self, part: Path, tensors: Mapping[str, Tensor]) -> None:
        path = part / f"rank{self.engine.rank}.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
        _sync(path)
        path.with_suffix(DESCRIBED).write_text(json.dumps(_described(path)))  # by each rank at once: it takes its time

    def _finish(self, part: Path, index: dict[str, Any]) -> None:
        """Gathers what the ranks say of their files, marks the checkpoint as complete and gives it its name."""
        step: int = index["step"]
        index["files"] = {}
        for rank in range(self.engine.world):
            described = part / f"rank{rank}{DESCRIBED}"
            index["files"][f"rank{rank}.safetensors"] = json.loads(described.read_bytes())
            described.unlink()
        text = json.dumps(index, allow_nan=False, separators=(",", ":")).encode()
        for name, data in ((INDEX, text), (COMPLETE, hashlib.sha256(text).hexdigest().encode())):
            (part / name).write_bytes(data)
            _sync(part / name)
        _sync(part)
        _remove(self.path(step))  # it was passed over
        os.replace(part, self.path(step))
        _sync(self.root)
        self._passed_over.discard(step)
        # What lies ahead of this step was passed over, too, or this run would have gone on from there.
        kept = [other for other in self._steps() if other <= step and other not in self._passed_over]
        for other in set(self._steps()) - set(kept[: self.keep]):
            with suppress(OSError):
                _remove(self.path(other))

    def _steps(self) -> list[int]:
        """Returns the steps of the checkpoints that are there, usable or not, newest first."""
        return steps_in(self.root)

    def _read(self, step: int, reached: Mapping[int, int]) -> Found:
        """Returns a checkpoint, each byte of which was looked at.

        Raises:
            Unusable: it is not complete, not what was written, or not this run's.
        """
        path = self.path(step)
        try:
            index = index_of(path)
            self._check_origin(index, step, reached)
            tensors = tensors_of(path, index, rank=0)
            if self.engine.rank:
                tensors = {name: tensor for name, tensor in tensors.items() if not _own(name)}
                tensors |= tensors_of(path, index, self.engine.rank)
            records = tuple((attempt, last) for attempt, last in index["records"])
            return Found(path, step, join(tensors, index["plain"]), records)
        except OSError as error:
            raise Unusable(f"{Path(error.filename or path).name} cannot be read ({error.strerror})") from None
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Unusable(f"it is not of the format that this version reads ({type(error).__name__})") from None

    def _check_origin(self, index: Mapping[str, Any], step: int, reached: Mapping[int, int]) -> None:
        if index["world"] != self.engine.world:
            raise Unusable(
                f"{index['world']} rank(s) wrote it and this run has {self.engine.world}; go on with as many as then"
            )
        if index["identity"] != self.identity:
            raise Unusable(f"it is of another run ({index['run']})")
        if index["step"] != step:
            raise Unusable(f"it was made after step {index['step']}")
        if self.engine.rank == 0 and any(reached.get(attempt, -1) < last for attempt, last in index["records"]):
            raise Unusable("the records of the steps before it are gone")


def steps_in(root: Path) -> list[int]:
    """Returns the steps of the checkpoints that are in a folder, usable or not, newest first."""
    with suppress(OSError):
        found = [re.fullmatch(r"step-(\d{8,})", path.name) for path in root.iterdir()]
        return sorted((int(match[1]) for match in found if match and int(match[1])), reverse=True)
    return []


def index_of(path: Path) -> dict[str, Any]:
    """Returns what the index of a checkpoint says.

    Raises:
        Unusable: it is not complete, not what was written, or of another format.
    """
    if not (path / COMPLETE).exists():
        raise Unusable("it was not written to its end")
    text = read_regular(path / INDEX)
    if hashlib.sha256(text).hexdigest().encode() != read_regular(path / COMPLETE):
        raise Unusable(f"{INDEX} is not what was written")
    index: dict[str, Any] = json.loads(text, object_hook=_number)
    if index["format"] != FORMAT:
        raise Unusable(f"its format has the number {index['format']}, this version reads {FORMAT}")
    return index


def tensors_of(path: Path, index: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
    """Returns what one rank has written, each byte of which was looked at.

    Raises:
        Unusable: it is not what was written.
    """
    name = f"rank{rank}.safetensors"
    file, described = path / name, index["files"][name]
    if not file.is_file():
        raise Unusable(f"{name} is missing")
    if file.stat().st_size != described["bytes"]:
        raise Unusable(f"{name} has {file.stat().st_size:,} bytes, {described['bytes']:,} were written")
    if _hash(file) != described["sha256"]:
        raise Unusable(f"{name} is not what was written")
    return load_file(file)


def split(state: State, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors of nested dicts by their paths, as in model/token, and the same dicts without them."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for key, value in state.items():
        assert "/" not in key, key
        if isinstance(value, Tensor):
            tensors[prefix + key] = value
        elif isinstance(value, Mapping):
            inner, plain[key] = split(value, f"{prefix}{key}/")
            tensors |= inner
        else:
            plain[key] = value
    return tensors, plain


def join(tensors: Mapping[str, Tensor], plain: dict[str, Any]) -> dict[str, Any]:
    """Returns what `split` took apart; the tensors are put into `plain` itself."""
    for path, tensor in tensors.items():
        *folders, name = path.split("/")
        place = plain
        for folder in folders:
            place = place[folder]
        place[name] = tensor
    return plain


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Returns the state of torch's generators that this rank draws from. Nothing of ours draws from any other."""
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Puts the generators back to where `random_state` found them."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def wholes(path: Path, index: Mapping[str, Any], section: str) -> dict[str, Tensor]:
    """Returns the weights below a section ("trainer"), whole, by name, from the parts of all ranks if need be.

    Raises:
        Unusable: a file is not what was written.
    """
    prefix, own = f"{section}/model/", f"{section}/{OWN}/model/"
    shapes = index["plain"][section].get("shapes", {})
    files = [tensors_of(path, index, rank) for rank in range(index["world"] if shapes else 1)]
    found = {name.removeprefix(prefix): x for name, x in files[0].items() if name.startswith(prefix)}
    for name, shape in shapes.items():
        found[name] = torch.cat([tensors[own + name] for tensors in files]).view(shape)
    return found


def _own(path: str) -> bool:
    """Tells whether a tensor is one rank's alone."""
    return OWN in path.split("/")[:-1]


def _check_fit(found: State, wanted: State, late: Mapping[str, Tensor]) -> None:
    """Raises Unusable unless `found` has the keys of `wanted`, with tensors of the same types and shapes."""
    (tensors, plain), (like, _) = split(found), split(wanted)
    if missing := sorted(like.keys() - tensors.keys()) or sorted(wanted.keys() - plain.keys() - tensors.keys()):
        raise Unusable(f"it lacks {missing[0]}")
    for name, tensor in tensors.items():
        model = like.get(name, late.get(name))
        if model is None:
            raise Unusable(f"it has {name}, which this run has no place for")
        if (tensor.dtype, tensor.shape) != (model.dtype, model.shape):
            raise Unusable(f"{name} is {_kind(tensor)} there and {_kind(model)} here")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _remove(path: Path) -> None:
    """Removes a folder with all in it, or whatever else has its name. It is not opened: a pipe would wait for ever."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _described(path: Path) -> dict[str, Any]:
    """Returns size, hash and tensors of a safetensors file: 8 bytes of length, a JSON header, the data."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    tensors = {name: {"dtype": entry["dtype"], "shape": entry["shape"]} for name, entry in header.items()}
    return {"bytes": path.stat().st_size, "sha256": _hash(path), "tensors": tensors}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, would outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _strict(value: Any) -> Any:
    """Returns `value` as strict JSON can hold it: a float that is not finite is {"float": "nan"}."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, list | tuple) else value


def _number(entry: dict[str, Any]) -> Any:
    return float(entry["float"]) if entry.keys() == {"float"} else entry
