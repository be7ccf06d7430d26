"""Batches as a pure function of (seed, step), the same global batch for every number of ranks.

Ranks share by index, not by shard: every rank holds the whole split and takes its slice of each global batch, so the
number of shards underneath does not matter, every rank gets the same number of steps, and no sample comes twice.
"""

import numpy as np
from numpy.typing import NDArray

from normscale.config.sharing import check_divides
from normscale.data.task import IGNORE, MicroBatch, Samples, Task
from normscale.errors import DataError

HELD_OUT_ORDER = 0  # not the run's seed: every run is judged on the same samples


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
        self, samples: Samples, *, batch: int, seed: int, accumulate: int = 1, rank: int = 0, world: int = 1
    ) -> None:
        """Takes the numbered samples of a task's training split.

        Raises:
            ConfigError: `batch` is not a multiple of `world` x `accumulate`.
            DataError: the split does not fill one batch.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not one of {world}")
        check_divides(batch, world, accumulate)
        if len(samples) < batch:
            raise too_few(len(samples), batch)
        self.data = samples
        self.batch, self.accumulate, self.rank, self.world, self.seed = batch, accumulate, rank, world, seed
        self.steps_per_epoch = len(samples) // batch
        self._epoch: tuple[int, NDArray[np.int64]] | None = None

    def window(self, step: int) -> list[MicroBatch]:
        """Returns this rank's micro-batches of one optimizer step; step 0 is the first."""
        return [self.data.batch(samples) for samples in self.samples(step)]

    def samples(self, step: int) -> NDArray[np.int64]:
        """Returns the numbers of this rank's samples of one step.

        Shape:
            [accumulate, batch / (world x accumulate)]
        """
        if step < 0:
            raise ValueError(f"step {step} is negative")
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, batches(len(self.data), self.batch, self.seed, epoch))
        ranks: NDArray[np.int64] = self._epoch[1][position].reshape(self.world, self.accumulate, -1)
        mine: NDArray[np.int64] = ranks[self.rank]
        return mine

    def facts(self) -> dict[str, str | int]:
        """Returns what a record says about the order of the data."""
        return {
            "samples": len(self.data),
            "steps_per_epoch": self.steps_per_epoch,
            "dropped_samples": len(self.data) - self.steps_per_epoch * self.batch,  # of each epoch
            "sharding": "by index: every rank holds the split and takes its slice of each global batch",
        }


def held_out_batches(task: Task, batch: int, n: int, key: str = "train.batch") -> list[MicroBatch]:
    """Returns the first n batches of the held-out split in a fixed mixed order, or as many as it fills.

    The order does not follow the corpus, where n small batches would come from one file. It is the same for every
    seed, rank and number of ranks. `key` is where the configuration says `batch`.

    Raises:
        DataError: the held-out split does not fill one batch.
    """
    if len(task.held_out) < batch:
        raise too_few(len(task.held_out), batch, key, "held-out ")
    return [task.held_out.batch(samples) for samples in batches(len(task.held_out), batch, HELD_OUT_ORDER, 0)[:n]]


def unigram_of(task: Task, held_out: list[MicroBatch]) -> float:
    """Returns what the frequencies of the training targets alone score (nats per target) on exactly these batches.

    A few small batches differ from the whole split by several hundredths of a nat, which a comparison with a loss that
    was measured on them must not contain.
    """
    counted = [x.targets_BT != IGNORE for x in held_out]
    targets = np.concatenate([x.targets_BT[keep].numpy() for x, keep in zip(held_out, counted, strict=True)])
    positions = np.concatenate([keep.nonzero()[:, 1].numpy() for keep in counted])
    seen = task.frequencies + 1.0
    nats = -np.log(seen / seen.sum(axis=-1, keepdims=True))
    nats_TV = np.broadcast_to(nats, (held_out[0].targets_BT.shape[1], task.vocab))
    return float(nats_TV[positions, targets].mean())


def too_few(samples: int, batch: int, key: str = "train.batch", split: str = "") -> DataError:
    """Returns the error of a split that does not fill one batch."""
    return DataError(
        f"{key}: {batch} is too many; there are {samples} {split}sequences and one batch needs {batch}; "
        f"lower {key}, or give more text or a smaller model.context"
    )
