"""A corpus: two splits of bytes that share nothing, read from one source."""

import functools
import sys
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from normscale.config.schema import DataConfig
from normscale.data import embedded, hub, local
from normscale.data.rows import Row, Source
from normscale.errors import DataError

Split = Literal["train", "held_out"]
Bytes = NDArray[np.uint8]
COLUMN = "bytes"


@dataclass(frozen=True, eq=False)
class Corpus:
    """The bytes of both splits. `train` and `held_out` are read-only views of the text of `tables`."""

    name: str
    digest: str  # sha256 of the length of the training split (8 bytes, little-endian), its bytes, the held-out bytes
    train: Bytes
    held_out: Bytes
    unigram_nats: float  # what a model scores on the held-out split that knows the training frequencies alone
    split: str
    tables: dict[Split, Any] = field(repr=False)  # datasets.Dataset with columns place and text
    origin: dict[str, str] = field(default_factory=dict)

    vocab: int = 256

    def facts(self) -> dict[str, str | int | float]:
        """Returns what a record says about the data."""
        return {
            "name": self.name,
            "digest": self.digest,
            "train_tokens": self.train.size,
            "held_out_tokens": self.held_out.size,
            "unigram_nats": self.unigram_nats,
            "split": self.split,
            **self.origin,
        }


def load_corpus(config: DataConfig) -> Corpus:
    """Returns the corpus that `config` asks for. It is not cached: files may change between two calls.

    Raises:
        DataError: the source does not exist, cannot be read, or is too short to be split.
    """
    if config.source == "embedded":
        source = embedded.read(config)
    elif config.source.startswith("hub:"):
        source = hub.read(config)
    else:
        source = local.read(config)
    return build(config, source)


@functools.lru_cache(maxsize=4)
def corpus_of(config: DataConfig) -> Corpus:
    """Returns the corpus, read once a process."""
    return load_corpus(config)


def build(config: DataConfig, source: Source) -> Corpus:
    """Returns the corpus made of a source's rows, each split cut at its limit (held-out: that share of the other's)."""
    limit = sys.maxsize if config.max_bytes is None else config.max_bytes
    rows = _fill(source, {"train": limit, "held_out": max(1, int(limit * config.held_out))})
    tables = {name: _table(rows[name]) for name in rows}
    train, held_out = joined(tables["train"])[0], joined(tables["held_out"])[0]
    if not (train.size and held_out.size):
        raise DataError(
            f"data.source: {config.source!r} holds too little text to be split with data.held_out={config.held_out:g} "
            f"(training {train.size} bytes, held-out {held_out.size}); give more text or change data.held_out"
        )
    digest = sha256(train.size.to_bytes(8, "little"))
    digest.update(train.data)
    digest.update(held_out.data)
    return Corpus(
        name=config.source,
        digest=digest.hexdigest(),
        train=train,
        held_out=held_out,
        unigram_nats=unigram_nats(train, held_out),
        split=source.split,
        tables=tables,
        origin=source.origin,
    )


def unigram_nats(train: Bytes, targets: Bytes) -> float:
    """Returns the cross-entropy (nats per byte) of `targets` under the add-one-smoothed frequencies of `train`."""
    seen = np.bincount(train, minlength=256) + 1.0
    asked = np.bincount(targets, minlength=256) / targets.size
    return float(-(asked * np.log(seen / seen.sum())).sum())


def packed(corpus: Corpus, split: Split, context: int) -> Any:
    """Returns a `datasets.Dataset` of rows of `context` + 1 bytes, as torch tensors on access.

    A row begins with the last byte of the row before it, so every byte but the first is a target exactly once. Bytes at
    the end that fill no row are dropped.

    Raises:
        DataError: the split does not fill one row.
    """
    data: Bytes = getattr(corpus, split)
    n = (data.size - 1) // context
    if n < 1:
        raise too_short(corpus, context, 1)
    windows = np.lib.stride_tricks.sliding_window_view(data, context + 1)[::context]
    values = pa.FixedSizeListArray.from_arrays(pa.array(windows.reshape(-1)), context + 1)
    return datasets.Dataset(pa.table({COLUMN: values})).with_format("torch")


def rows_of(dataset: Any) -> Bytes:
    """Returns the rows of a packed data set as one array, without a copy where they lie in one piece.

    Shape:
        [samples, context + 1]
    """
    column = dataset.with_format("arrow")[:][COLUMN].combine_chunks()
    chunk = column.chunk(0) if hasattr(column, "chunk") else column
    values: Bytes = chunk.flatten().to_numpy(zero_copy_only=True)
    return values.reshape(len(chunk), -1)


def require(corpus: Corpus, context: int, batch: int, key: str = "train.batch") -> None:
    """Checks that each split fills one batch, and raises a `DataError` with the numbers where one does not."""
    if min(corpus.train.size, corpus.held_out.size) < batch * context + 1:
        raise too_short(corpus, context, batch, key)


def too_short(corpus: Corpus, context: int, batch: int, key: str = "train.batch") -> DataError:
    """Returns the error that says how many bytes there are and how many are needed; `key` gave the batch."""
    thing = "data.source" if key == "train.batch" else f"{key}: {batch} is too many; data.source"
    return DataError(
        f"{thing}: {corpus.name!r} is too short: one batch of {batch} x {context} needs {batch * context + 1} "
        f"bytes in each split, training has {corpus.train.size} and held-out {corpus.held_out.size}; give more text, "
        f"or change data.max_bytes, data.held_out, {key} or model.context"
    )


def _fill(source: Source, limits: dict[Split, int]) -> dict[Split, list[Row]]:
    rows: dict[Split, list[Row]] = {name: [] for name in limits}
    room = dict(limits)
    for row in source.rows:
        name: Split = "held_out" if row.held_out else "train"
        text = row.text[: room[name]]
        if text:
            rows[name].append(row._replace(text=text))
            room[name] -= len(text)
        if not any(room.values()):
            break
    return rows


def _table(rows: list[Row]) -> Any:
    # large_binary: offsets of 64 bits, so a split may pass 2 GB and still be one buffer.
    features = datasets.Features({"place": datasets.Value("string"), "text": datasets.Value("large_binary")})
    columns = {"place": [row.place for row in rows], "text": [row.text for row in rows]}
    return datasets.Dataset.from_dict(columns, features=features)


def joined(table: Any, column: str = "text") -> tuple[Bytes, NDArray[np.int64]]:
    """Returns a column's bytes one row after the other, as they lie in memory, and where each row begins.

    Shape:
        bytes [n]; places [rows + 1], the last of which is n.
    """
    text = table.with_format("arrow")[:][column].combine_chunks()
    chunk = text.chunk(0) if isinstance(text, pa.ChunkedArray) else text
    if not len(chunk):
        return np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    _, offsets, values = chunk.buffers()
    places = np.frombuffer(offsets, dtype=np.int64)[chunk.offset :][: len(chunk) + 1]
    data = np.frombuffer(values, dtype=np.uint8)[places[0] : places[-1]]
    data.flags.writeable = False
    return data, places - places[0]
