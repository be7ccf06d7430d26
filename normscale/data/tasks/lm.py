"""Language modelling: every byte from the bytes before it."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from normscale.config.schema import RunConfig
from normscale.data.corpus import corpus_of, packed, require, rows_of
from normscale.data.task import MicroBatch, Task


class Windows:
    """Rows of one byte more than the context; targets are the next byte."""

    def __init__(self, dataset: Any) -> None:
        """Takes rows as `packed` makes them, however they are sharded, shuffled or formatted."""
        self.rows = rows_of(dataset)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, samples: NDArray[Any]) -> MicroBatch:
        tokens = torch.from_numpy(self.rows[samples].astype(np.int64))
        return MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def make(config: RunConfig) -> Task:
    """Returns the task, with a vocabulary of the 256 bytes."""
    corpus, context = corpus_of(config.data), config.model.context
    require(corpus, context, config.train.batch)
    train, held_out = Windows(packed(corpus, "train", context)), Windows(packed(corpus, "held_out", context))
    frequencies = np.bincount(corpus.train, minlength=256)
    return Task("lm", 256, corpus.digest, train, held_out, frequencies, corpus.facts())
