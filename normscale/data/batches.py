"""Batches as a pure function of (seed, step), the same global batch for every number of ranks.

Ranks share by index, not by shard: every rank holds the whole split and takes its slice of each global batch, so the
number of shards underneath does not matter, every rank gets the same number of steps, and no sample comes twice.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscale.data.corpus import COLUMN, Bytes, Corpus, packed, require, unigram_nats
from normscale.errors import ConfigError, DataError

IGNORE = -100  # a target that no loss and no count includes
HELD_OUT_SEED = 0  # not the run's: every run is judged on the same bytes


class MicroBatch(NamedTuple):
    """What one forward pass takes.

    Shape:
        tokens_BT, targets_BT: [B, T] int64 on the CPU; targets are the next token, or `IGNORE`.
    """

    tokens_BT: Tensor
    targets_BT: Tensor

    @property
    def n_targets(self) -> int:
        """The number of targets that count."""
        return int((self.targets_BT != IGNORE).sum())


def batches(n_samples: int, batch: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the sample numbers of an epoch's global batches; samples that fill no batch are dropped.

    Shape:
        [n_samples // batch, batch]
    """
    # A sort of the generator's raw numbers: NumPy promises those for every version, but not its permutations.
    raw = np.random.PCG64([seed, epoch]).random_raw(n_samples)
    order = np.argsort(raw, kind="stable")
    steps = n_samples // batch
    return order[: steps * batch].reshape(steps, batch)


class Batches:
    """The windows of one rank. `window(step)` depends on nothing but the data, the seed and the step (from 0)."""

    def __init__(
        self, dataset: Any, *, batch: int, seed: int, accumulate: int = 1, rank: int = 0, world: int = 1
    ) -> None:
        """Takes rows as `packed` makes them, however they are sharded, shuffled or formatted.

        Raises:
            ConfigError: `batch` is not a multiple of `world` x `accumulate`.
            DataError: the data set does not fill one batch.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not one of {world}")
        check_divides(batch, world, accumulate)
        self._rows = rows_of(dataset)
        if len(self._rows) < batch:
            raise DataError(
                f"data.source: too short for one batch: {len(self._rows)} sequences, train.batch is {batch}; "
                "give more text, or lower train.batch or model.context"
            )
        self.batch, self.accumulate, self.rank, self.world, self.seed = batch, accumulate, rank, world, seed
        self.context = self._rows.shape[1] - 1
        self.steps_per_epoch = len(self._rows) // batch
        self.targets_per_step = batch * self.context  # over all ranks: what the token sum is divided by
        self._epoch: tuple[int, NDArray[np.int64]] | None = None

    def window(self, step: int) -> list[MicroBatch]:
        """Returns this rank's micro-batches of one optimizer step; step 0 is the first."""
        return [_micro_batch(self._rows[samples]) for samples in self.samples(step)]

    def samples(self, step: int) -> NDArray[np.int64]:
        """Returns the numbers of this rank's samples of one step.

        Shape:
            [accumulate, batch / (world x accumulate)]
        """
        if step < 0:
            raise ValueError(f"step {step} is negative")
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, batches(len(self._rows), self.batch, self.seed, epoch))
        ranks: NDArray[np.int64] = self._epoch[1][position].reshape(self.world, self.accumulate, -1)
        mine: NDArray[np.int64] = ranks[self.rank]
        return mine

    def facts(self) -> dict[str, str | int]:
        """Returns what a record says about the order of the data."""
        return {
            "samples": len(self._rows),
            "steps_per_epoch": self.steps_per_epoch,
            "dropped_samples": len(self._rows) - self.steps_per_epoch * self.batch,  # of each epoch
            "sharding": "by index: every rank holds the split and takes its slice of each global batch",
        }


def held_out_batches(corpus: Corpus, context: int, batch: int, n: int, key: str = "train.batch") -> list[MicroBatch]:
    """Returns the first n batches of the held-out split in a fixed mixed order, or as many as it fills.

    The order does not follow the corpus, where n small batches would come from one file. It is the same for every
    seed, rank and number of ranks. `key` is where the configuration says `batch`.

    Raises:
        DataError: a split does not fill one batch.
    """
    require(corpus, context, batch, key)
    rows = rows_of(packed(corpus, "held_out", context))
    return [_micro_batch(rows[samples]) for samples in batches(len(rows), batch, HELD_OUT_SEED, 0)[:n]]


def unigram_of(corpus: Corpus, held_out: list[MicroBatch]) -> float:
    """Returns what the training frequencies alone score (nats per target) on exactly these batches.

    A few small batches differ from the whole split by several hundredths of a nat, which a comparison with a loss that
    was measured on them must not contain.
    """
    targets = np.concatenate([x.targets_BT[x.targets_BT != IGNORE].numpy() for x in held_out])
    return unigram_nats(corpus.train, targets.astype(np.uint8))


def check_divides(batch: int, world: int, accumulate: int) -> None:
    """Checks that every rank and every micro-batch gets the same number of sequences.

    Raises:
        ConfigError: with the three numbers and the nearest batch that would do.
    """
    unit = world * accumulate
    if batch % unit:
        near = max(unit, round(batch / unit) * unit)
        raise ConfigError(
            f"train.batch: {batch} cannot be shared by {world} ranks x train.accumulate={accumulate}; "
            f"it must be a multiple of {unit}, the nearest is {near}"
        )


def rows_of(dataset: Any) -> Bytes:
    """Returns the rows of a packed data set as one array, without a copy where they lie in one piece.

    Shape:
        [samples, context + 1]
    """
    column = dataset.with_format("arrow")[:][COLUMN].combine_chunks()
    chunk = column.chunk(0) if hasattr(column, "chunk") else column
    values: Bytes = chunk.flatten().to_numpy(zero_copy_only=True)
    return values.reshape(len(chunk), -1)


def _micro_batch(rows: Bytes) -> MicroBatch:
    tokens = torch.from_numpy(rows.astype(np.int64))
    return MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
