"""Masked language modelling: hidden bytes of a row from the others, on both sides.

Of the tokens to be predicted, 80 % become MASK, 10 % a random byte and 10 % stay. Their number per row is fixed, the
rounded share `data.noise` of the context and at least 1, as in BERT's own code; which of the three happens is drawn
for each token. With segments a row is cut into so many pieces of equal length, numbered in order: for two, the halves
are what BERT calls sentence A and B, though nothing says that they are sentences.

In the held-out split every token to be predicted is MASK. Of those that are not, half are what they seem, and a model
that says so of each, without a look at its neighbours, is about 0.2 nats below the unigram entropy.

Reference: Devlin et al. 2019, arXiv:1810.04805, section 3.1 (Task #1); the text is not shuffled into pairs (Task #2).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from normscale.config.schema import RunConfig
from normscale.data.corpus import Bytes, Split, corpus_of, packed, require, rows_of
from normscale.data.draws import Draws, chosen, unit
from normscale.data.task import IGNORE, MicroBatch, Task

MASK = 256
VOCAB = 257
MASKED = 0.8


class Masked:
    """Rows of text with tokens hidden."""

    def __init__(self, rows: Bytes, draws: Draws, *, hidden: int, masked: float = MASKED, segments: int = 0) -> None:
        """Takes rows of the context's length, how many of each row's tokens are to be predicted, and the share of
        those that become MASK; the rest is shared out between random bytes and those that stay.

        Shape:
            rows: [samples, T].
        """
        self.rows, self.draws, self.hidden, self.masked = rows, draws, hidden, masked
        context = rows.shape[1]
        self.segments_T = torch.arange(context) * segments // context if segments else None

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, samples: NDArray[Any]) -> MicroBatch:
        rows = self.rows[samples].astype(np.int64)
        where, how, what = np.split(self.draws.raw(samples, 3 * rows.shape[1]), 3, axis=1)
        hidden, share = chosen(where, self.hidden), unit(how)
        tokens = np.where(hidden & (share < self.masked), MASK, rows)
        other = hidden & (share >= self.masked) & (share < (1 + self.masked) / 2)
        tokens = np.where(other, (what % np.uint64(256)).astype(np.int64), tokens)
        targets = np.where(hidden, rows, IGNORE)
        segments = None if self.segments_T is None else self.segments_T.repeat(len(rows), 1)
        return MicroBatch(torch.from_numpy(tokens), torch.from_numpy(targets), segments_BT=segments)


def make(config: RunConfig) -> Task:
    """Returns the task, with a vocabulary of the 256 bytes and MASK.

    Its frequencies are those over all ways to hide: every byte of the text is as likely a target.
    """
    corpus, context = corpus_of(config.data), config.model.context
    require(corpus, context, config.train.batch)
    hidden = hidden_tokens(context, config.data.noise)

    def samples(split: Split) -> Masked:
        rows = rows_of(packed(corpus, split, context))[:, :-1]  # the last byte begins the next row
        masked = MASKED if split == "train" else 1.0
        draws = Draws(config.seed, split)
        return Masked(rows, draws, hidden=hidden, masked=masked, segments=config.model.segments)

    told = {**corpus.facts(), "mask": MASK, "targets_per_sample": hidden}
    frequencies = np.bincount(corpus.train, minlength=VOCAB)
    return Task("mlm", VOCAB, corpus.digest, samples("train"), samples("held_out"), frequencies, told)


def hidden_tokens(context: int, noise: float) -> int:
    """Returns how many tokens of a row are hidden: never none, and never all where there is more than one."""
    return max(1, min(round(context * noise), context - 1))
