"""Copying: the decoder writes the random symbols that the encoder read, or (`reverse`) writes them backwards.

No text is needed, and without the encoder nothing can be learned: the symbols are independent, so that a model that
looks at the decoder's side alone stays at ln(symbols).
"""

import math
from hashlib import sha256
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from normscale.config.schema import RunConfig
from normscale.data.corpus import Split
from normscale.data.draws import SPLITS, Draws, Raw, mix
from normscale.data.task import MicroBatch, Task
from normscale.errors import ConfigError

SAMPLES: dict[Split, int] = {"train": 2**18, "held_out": 2**14}  # of an endless stream
ROWS_LEAST_LOG2 = 32  # so that a row hardly comes twice, and none can be learned by heart


class Symbols:
    """Rows of random symbols, each symbol equally likely.

    The splits share no row: a bit of a hash of the symbols says where a row belongs, and a row of the other split is
    drawn again.
    """

    def __init__(self, draws: Draws, split: Split, *, symbols: int, context: int, backwards: bool) -> None:
        self.draws, self.split, self.symbols, self.context = draws, split, symbols, context
        self.backwards = backwards

    def __len__(self) -> int:
        return SAMPLES[self.split]

    def batch(self, samples: NDArray[Any]) -> MicroBatch:
        source = self.rows(samples)
        targets = source[:, ::-1].copy() if self.backwards else source.copy()
        begin = np.full((len(source), 1), self.symbols)
        tokens = np.hstack([begin, targets[:, :-1]])
        return MicroBatch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(source))

    def rows(self, samples: NDArray[Any]) -> NDArray[np.int64]:
        """Returns what the encoder reads.

        Shape:
            samples: [B]; result [B, context].
        """
        rows = np.empty((len(samples), self.context), dtype=np.int64)
        open_rows, attempt = np.arange(len(samples)), 0
        while open_rows.size:
            raw = self.draws.raw(samples[open_rows], self.context, attempt) % np.uint64(self.symbols)
            rows[open_rows] = raw
            open_rows = open_rows[side(raw) != SPLITS.index(self.split)]
            attempt += 1
        return rows


def side(rows: Raw) -> NDArray[np.int64]:
    """Returns for each row the index of the split it belongs to: one bit that depends on every symbol.

    Shape:
        rows: [B, context]; result [B].
    """
    places = np.arange(rows.shape[1], dtype=np.uint64) << np.uint64(32)
    mixed: Raw = mix(mix(rows + places).sum(axis=1, dtype=np.uint64))
    return (mixed >> np.uint64(63)).astype(np.int64)


def make(config: RunConfig) -> Task:
    """Returns the task, with a vocabulary of the symbols and BEGIN."""
    return task_of(config, "copy")


def task_of(config: RunConfig, name: Literal["copy", "reverse"]) -> Task:
    """Returns the task of that name.

    Raises:
        ConfigError: there are so few different rows that they could be learned by heart.
    """
    symbols, context = config.data.symbols, config.model.context
    if context * math.log2(symbols) < ROWS_LEAST_LOG2:
        raise ConfigError(
            f"data.symbols: {symbols} symbols make only {symbols**context} different rows of model.context={context},"
            f" which could be learned by heart; raise one of the two until there are {2**ROWS_LEAST_LOG2}",
            "data.symbols",
        )

    def samples(split: Split) -> Symbols:
        draws = Draws(config.seed, split)
        return Symbols(draws, split, symbols=symbols, context=context, backwards=name == "reverse")

    frequencies = np.zeros(symbols + 1)
    frequencies[:symbols] = SAMPLES["train"] * context / symbols  # BEGIN is never a target
    told = {
        "name": name,
        "symbols": symbols,
        "targets_per_sample": context,
        "split": "by a hash of the symbols: no row is in both",
        "special": f"begin {symbols}",
    }
    digest = sha256(f"{name} of {context} from {symbols}, {SAMPLES}".encode()).hexdigest()
    return Task(name, symbols + 1, digest, samples("train"), samples("held_out"), frequencies, told)
