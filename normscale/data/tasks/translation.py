"""Translation of lines of parallel text, byte by byte or in subwords.

The encoder reads a line and END; the decoder reads BEGIN and the line's translation, and is to say the translation and
END. Every side is padded to the context, so that shapes never change; no padding is attended to in the encoder or is a
target. Pairs with a line that does not fit, or is blank, are left out and counted, and so are held-out pairs that
training has too.

The tokens are the 256 bytes or, with `data.subwords`, a byte-pair vocabulary; BEGIN, END and PAD follow them.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from normscale.config.schema import DataConfig, RunConfig
from normscale.config.sources import plain
from normscale.data import hub, parallel
from normscale.data.parallel import Pair
from normscale.data.rows import held_by_position
from normscale.data.subwords import Subwords, learn, text_of
from normscale.data.task import IGNORE, MicroBatch, Task
from normscale.errors import DataError

BYTES = 256


class Marks(NamedTuple):
    """The tokens that are no text: they follow those that are."""

    begin: int
    end: int
    pad: int

    @classmethod
    def after(cls, size: int) -> "Marks":
        """Returns those of a vocabulary whose text has `size` tokens."""
        return cls(size, size + 1, size + 2)


BEGIN, END, PAD = Marks.after(BYTES)  # of the bytes


class Lines:
    """Lines one after the other, as tokens that are looked up by number."""

    def __init__(self, lines: Sequence[Any], context: int, marks: Marks) -> None:
        """Takes each line's tokens, fewer than the context: bytes, or an array."""
        self.places = np.cumsum([0, *map(len, lines)])
        self.data = np.concatenate([np.frombuffer(x, np.uint8) if isinstance(x, bytes) else x for x in lines])
        self.context, self.marks = context, marks

    def __getitem__(self, i: int) -> NDArray[Any]:
        """Returns the tokens of one line."""
        return self.data[self.places[i] : self.places[i + 1]]

    def batch(self, samples: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns each line, END and padding up to the context, and where END stands.

        Shape:
            samples: [B]; result [B, context] and [B, 1].
        """
        begins = self.places[samples][:, None]
        ends = self.places[samples + 1][:, None] - begins
        columns = np.arange(self.context)
        inside = np.minimum(begins + columns, self.data.size - 1)
        tokens = np.where(columns < ends, self.data[inside].astype(np.int64), self.marks.pad)
        np.put_along_axis(tokens, ends, self.marks.end, axis=1)
        return tokens, ends


class Pairs:
    """Pairs of lines, each of fewer tokens than the context."""

    def __init__(self, lines: Sequence["_Tokens"], context: int, subwords: Subwords | None) -> None:
        size = subwords.size if subwords else BYTES
        self.subwords, self.marks = subwords, Marks.after(size)
        self.source = Lines([line.source for line in lines], context, self.marks)
        self.target = Lines([line.target for line in lines], context, self.marks)
        self.columns, self.vocab = np.arange(context), size + len(self.marks)

    def __len__(self) -> int:
        return len(self.source.places) - 1

    def batch(self, samples: NDArray[Any]) -> MicroBatch:
        source, source_ends = self.source.batch(samples)
        target, target_ends = self.target.batch(samples)
        tokens = np.full_like(target, self.marks.begin)
        tokens[:, 1:] = np.where(target == self.marks.end, self.marks.pad, target)[:, :-1]  # END is said and never read
        targets = np.where(self.columns <= target_ends, target, IGNORE)
        keep = self.columns <= source_ends
        return MicroBatch(*(torch.from_numpy(x) for x in (tokens, targets, source, keep)))

    def text(self, tokens: Sequence[int]) -> str:
        """Returns what tokens say, those that are no text left out."""
        said = [token for token in tokens if 0 <= token < self.marks.begin]
        return self.subwords.decode(said) if self.subwords else bytes(said).decode(errors="replace")

    def frequencies(self) -> NDArray[np.int64]:
        """Returns how often each token is a target."""
        counts = np.bincount(self.target.data, minlength=self.vocab)
        counts[self.marks.end] = len(self)
        return counts

    def add_to(self, digest: Any) -> None:
        """Adds the number of pairs, the lengths of their lines and the tokens to a hash."""
        digest.update(len(self).to_bytes(8, "little"))
        for lines in (self.source, self.target):
            digest.update(np.diff(lines.places).astype("<i8").tobytes())
            digest.update(lines.data.astype(lines.data.dtype.newbyteorder("<"), copy=False).tobytes())


def make(config: RunConfig) -> Task:
    """Returns the task, with a vocabulary of the 256 bytes or of subwords, and BEGIN, END and PAD.

    Raises:
        DataError: a source cannot be read, files do not fit each other, or a split does not fill one batch.
    """
    data, context = config.data, config.model.context
    limit = sys.maxsize if data.max_bytes is None else data.max_bytes
    longest = None if data.subwords else context  # of bytes the length is known before they are read
    train = _Room(limit, longest)
    if data.held_out_source is None:
        split = f"by pair of lines: a share of {data.held_out:g}, evenly spread"
        held_out = _Room(max(1, int(limit * data.held_out)), longest)
        index = 0
        for pair in _read(data):
            held = held_by_position(index, data.held_out)
            index += (held_out if held else train).add(pair)
    else:
        split = "by split" if data.source.startswith("hub:") else "by file"
        held_out = _Room(limit, longest)
        for pair in _read(data):
            train.add(pair)
        for pair in _read(data, held_out=True):
            held_out.add(pair)
    repeated = held_out.drop(train)
    subwords = None
    if data.subwords:
        rooms = ((train, "data.source"), (held_out, _held_key(data)))
        assert data.languages is not None, "the configuration asks for them"
        text = [[text_of(pair, key, data.languages) for pair in room.pairs] for room, key in rooms]
        subwords = learn(text[0], data.subwords)
        lines = [room.encode(some, subwords, context) for room, some in zip((train, held_out), text, strict=True)]
    else:
        lines = [[_Tokens(pair.source, pair.target) for pair in room.pairs] for room in (train, held_out)]
    if min(map(len, lines)) < config.train.batch:
        raise _too_few(config, train, held_out, repeated, [len(some) for some in lines])

    pairs, held_pairs = (Pairs(some, context, subwords) for some in lines)
    digest = sha256()
    pairs.add_to(digest)
    held_pairs.add_to(digest)
    frequencies = pairs.frequencies()
    told: dict[str, str | int | float] = {
        "name": data.source,
        "languages": "-".join(data.languages or ()),
        "train_tokens": int(frequencies.sum()),
        "held_out_tokens": int(held_pairs.frequencies().sum()),
        "dropped_long": train.long + held_out.long,
        "dropped_blank": train.blank + held_out.blank,
        "dropped_repeated": repeated,
        "split": split,
        "special": "begin {}, end {}, padding {}".format(*pairs.marks),
    }
    if subwords:
        digest.update(subwords.digest())
        told["subwords"] = subwords.size
    return Task("translation", pairs.vocab, digest.hexdigest(), pairs, held_pairs, frequencies, told)


class _Tokens(NamedTuple):
    """One pair as tokens."""

    source: Any  # bytes, or an array of int32
    target: Any


def _held_key(data: DataConfig) -> str:
    return "data.source" if data.held_out_source is None else "data.held_out_source"


def _read(data: DataConfig, held_out: bool = False) -> Iterable[Pair]:
    """Returns the pairs of the training source, or of the one that is held out."""
    assert data.languages is not None, "the configuration asks for them"
    if data.source.startswith("hub:"):
        return hub.pairs(data, held_out)
    files = parallel.files_of(data.source, data.languages)
    if not held_out:
        return parallel.read(files)
    assert data.held_out_source is not None
    held_files = parallel.files_of(data.held_out_source, data.languages, "data.held_out_source")
    _require_others(files, held_files)
    return parallel.read(held_files, "data.held_out_source")


@dataclass
class _Room:
    """A split while it is filled: with the pairs that fit the context, until one is more than its limit leaves."""

    limit: int  # bytes, of both sides
    longest: int | None  # bytes that a line has fewer than; None: it is a matter of tokens
    pairs: list[Pair] = field(default_factory=list)
    long: int = 0
    blank: int = 0
    full: bool = False
    most: int = field(init=False)  # bytes of a pair that there would be room for

    def __post_init__(self) -> None:
        self.most = self.limit

    def add(self, pair: Pair) -> bool:
        """Takes a pair or counts why not, and returns whether it has text on both sides."""
        blank = not (pair.source.strip() and pair.target.strip())
        size = len(pair.source) + len(pair.target)
        if self.full:
            pass
        elif blank:
            self.blank += 1
        elif self.longest is not None and max(len(pair.source), len(pair.target)) >= self.longest:
            self.long += 1  # BEGIN or END takes one place
        elif size > self.most:
            self.long += 1  # it alone would end the split, and in subwords nothing has looked at its length yet
        elif size > self.limit:
            self.full = True
        else:
            self.limit -= size
            self.pairs.append(pair)
        return not blank

    def encode(self, text: Sequence[tuple[str, str]], subwords: Subwords, context: int) -> list[_Tokens]:
        """Returns the pairs in subwords, without those that do not fit the context, which are counted."""
        sides = (subwords.encode([pair[side] for pair in text]) for side in (0, 1))
        lines = [_Tokens(source, target) for source, target in zip(*sides, strict=True)]
        fit = [line for line in lines if max(map(len, line)) < context]
        self.long += len(lines) - len(fit)
        return fit

    def drop(self, other: "_Room") -> int:
        """Leaves out the pairs that another split has too, and returns how many they were."""
        known = {(pair.source, pair.target) for pair in other.pairs}
        before = len(self.pairs)
        self.pairs = [pair for pair in self.pairs if (pair.source, pair.target) not in known]
        return before - len(self.pairs)


def _require_others(files: tuple[Path, Path], held_files: tuple[Path, Path]) -> None:
    """Raises DataError where a held-out file is one of training, by whatever name."""
    for file, held_file in zip(files, held_files, strict=True):
        if os.path.samefile(file, held_file):
            raise DataError(
                f"data.held_out_source: {plain(str(held_file), 300)} is the file of data.source, so that held-out text"
                " would be trained on; name other files, or remove data.held_out_source to hold out a share"
            )


def _too_few(config: RunConfig, train: _Room, held_out: _Room, repeated: int, counts: Sequence[int]) -> DataError:
    key, share = "data.source", "data.held_out, "
    if config.data.held_out_source is not None:
        share = ""
        if counts[0] >= config.train.batch:
            key = "data.held_out_source"
    named = config.data.source if key == "data.source" else config.data.held_out_source
    return DataError(
        f"{key}: {named!r} is too short: one batch needs {config.train.batch} pairs in each split,"
        f" training has {counts[0]} and held-out {counts[1]} ({train.long + held_out.long} were longer"
        f" than model.context={config.model.context} or data.max_bytes holds, {train.blank + held_out.blank} blank and"
        f" {repeated} held out but in training too); give more text, or change data.max_bytes,"
        f" {share}train.batch or model.context"
    )
