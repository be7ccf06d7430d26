"""Translation of lines of parallel text, byte by byte.

The encoder reads a line and END; the decoder reads BEGIN and the line's translation, and is to say the translation and
END. Every side is padded to the context, so that shapes never change; no padding is attended to in the encoder or is a
target. Pairs with a line that does not fit, or is blank, are left out and counted, and so are held-out pairs that
training has too.
"""

import os
import sys
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray

from normscale.config.schema import RunConfig
from normscale.config.sources import plain
from normscale.data import parallel
from normscale.data.corpus import joined
from normscale.data.parallel import Pair
from normscale.data.rows import held_by_position
from normscale.data.task import IGNORE, MicroBatch, Task
from normscale.errors import DataError

BEGIN, END, PAD = 256, 257, 258
VOCAB = 259


class Lines:
    """One column of a table, as bytes that are looked up by row."""

    def __init__(self, table: Any, column: str, context: int) -> None:
        self.data, self.places = joined(table, column)
        self.context = context

    def batch(self, samples: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns each line, END and padding up to the context, and where END stands.

        Shape:
            samples: [B]; result [B, context] and [B, 1].
        """
        begins = self.places[samples][:, None]
        ends = self.places[samples + 1][:, None] - begins
        columns = np.arange(self.context)
        inside = np.minimum(begins + columns, self.data.size - 1)
        tokens = np.where(columns < ends, self.data[inside].astype(np.int64), PAD)
        np.put_along_axis(tokens, ends, END, axis=1)
        return tokens, ends


class Pairs:
    """Pairs of lines, each shorter than the context."""

    def __init__(self, table: Any, context: int) -> None:
        """Takes a `datasets.Dataset` with columns source and target."""
        self.table = table
        self.source, self.target = Lines(table, "source", context), Lines(table, "target", context)
        self.columns = np.arange(context)

    def __len__(self) -> int:
        return len(self.table)

    def batch(self, samples: NDArray[Any]) -> MicroBatch:
        source, source_ends = self.source.batch(samples)
        target, target_ends = self.target.batch(samples)
        tokens = np.full_like(target, BEGIN)
        tokens[:, 1:] = np.where(target == END, PAD, target)[:, :-1]  # END is said and never read
        targets = np.where(self.columns <= target_ends, target, IGNORE)
        keep = self.columns <= source_ends
        return MicroBatch(*(torch.from_numpy(x) for x in (tokens, targets, source, keep)))

    def frequencies(self) -> NDArray[np.int64]:
        """Returns how often each token is a target."""
        counts = np.bincount(self.target.data, minlength=VOCAB)
        counts[END] = len(self)
        return counts

    def add_to(self, digest: Any) -> None:
        """Adds the number of pairs, the lengths of their lines and the bytes to a hash."""
        digest.update(len(self).to_bytes(8, "little"))
        for lines in (self.source, self.target):
            digest.update(np.diff(lines.places).astype("<i8").tobytes())
            digest.update(lines.data.tobytes())


def make(config: RunConfig) -> Task:
    """Returns the task, with a vocabulary of the 256 bytes, BEGIN, END and PAD.

    Raises:
        DataError: a file cannot be read, the files do not fit each other, or a split does not fill one batch.
    """
    data, context = config.data, config.model.context
    assert data.languages is not None, "the configuration asks for them"
    limit = sys.maxsize if data.max_bytes is None else data.max_bytes
    train = _Room(limit, context)
    files = parallel.files_of(data.source, data.languages)
    if data.held_out_source is None:
        split = f"by pair of lines: a share of {data.held_out:g}, evenly spread"
        held_out = _Room(max(1, int(limit * data.held_out)), context)
        index = 0
        for pair in parallel.read(files):
            held = held_by_position(index, data.held_out)
            index += (held_out if held else train).add(pair)
    else:
        split = "by file"
        held_out = _Room(limit, context)
        held_files = parallel.files_of(data.held_out_source, data.languages, "data.held_out_source")
        _require_others(files, held_files)
        for pair in parallel.read(files):
            train.add(pair)
        for pair in parallel.read(held_files, "data.held_out_source"):
            held_out.add(pair)
    repeated = held_out.drop(train)
    if min(len(train.pairs), len(held_out.pairs)) < config.train.batch:
        raise _too_few(config, train, held_out, repeated)

    pairs, held_pairs = (Pairs(_table(room.pairs), context) for room in (train, held_out))
    digest = sha256()
    pairs.add_to(digest)
    held_pairs.add_to(digest)
    frequencies = pairs.frequencies()
    told: dict[str, str | int | float] = {
        "name": data.source,
        "languages": "-".join(data.languages),
        "train_tokens": int(frequencies.sum()),
        "held_out_tokens": int(held_pairs.frequencies().sum()),
        "dropped_long": train.long + held_out.long,
        "dropped_blank": train.blank + held_out.blank,
        "dropped_repeated": repeated,
        "split": split,
        "special": f"begin {BEGIN}, end {END}, padding {PAD}",
    }
    return Task("translation", VOCAB, digest.hexdigest(), pairs, held_pairs, frequencies, told)


@dataclass
class _Room:
    """A split while it is filled: with the pairs that fit the context, until one is more than its limit leaves."""

    limit: int  # bytes, of both sides
    context: int
    pairs: list[Pair] = field(default_factory=list)
    long: int = 0
    blank: int = 0
    full: bool = False

    def add(self, pair: Pair) -> bool:
        """Takes a pair or counts why not, and returns whether it has text on both sides."""
        blank = not (pair.source.strip() and pair.target.strip())
        size = len(pair.source) + len(pair.target)
        if self.full:
            pass
        elif blank:
            self.blank += 1
        elif max(len(pair.source), len(pair.target)) >= self.context:  # BEGIN or END takes one place
            self.long += 1
        elif size > self.limit:
            self.full = True
        else:
            self.limit -= size
            self.pairs.append(pair)
        return not blank

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


def _table(pairs: list[Pair]) -> Any:
    # large_binary: offsets of 64 bits, so a side may pass 2 GB and still be one buffer.
    binary = datasets.Value("large_binary")
    features = datasets.Features({"line": datasets.Value("int64"), "source": binary, "target": binary})
    line, source, target = zip(*pairs, strict=True)
    return datasets.Dataset.from_dict({"line": line, "source": source, "target": target}, features=features)


def _too_few(config: RunConfig, train: _Room, held_out: _Room, repeated: int) -> DataError:
    key, share = "data.source", "data.held_out, "
    if config.data.held_out_source is not None:
        share = ""
        if len(train.pairs) >= config.train.batch:
            key = "data.held_out_source"
    named = config.data.source if key == "data.source" else config.data.held_out_source
    return DataError(
        f"{key}: {named!r} is too short: one batch needs {config.train.batch} pairs in each split,"
        f" training has {len(train.pairs)} and held-out {len(held_out.pairs)} ({train.long + held_out.long} were longer"
        f" than model.context={config.model.context} holds, {train.blank + held_out.blank} blank and {repeated} held"
        f" out but in training too); give more text, or change data.max_bytes, {share}train.batch or model.context"
    )
