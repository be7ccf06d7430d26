"""Span corruption: the encoder reads a row with spans cut out, the decoder writes the spans.

A sentinel stands in the source where a span was, and in the target before the span's bytes; an end token closes the
target. The numbers of hidden tokens and of spans are fixed for a context, so source and target have one length each.

Reference: Raffel et al. 2020, arXiv:1910.10683, sections 3.1.4 and 3.3.4, and `random_spans_noise_mask` of its code.
There every row begins with a visible span and ends with a hidden one, so that a single span would always be the end of
its row; here the spans may stand anywhere. The source has no end token: its length is always the same.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from normscale.config.schema import RunConfig
from normscale.data.corpus import Bytes, Split, corpus_of, packed, require, rows_of
from normscale.data.draws import Draws, Raw, chosen
from normscale.data.task import MicroBatch, Task
from normscale.data.tasks.mlm import hidden_tokens
from normscale.errors import ConfigError

BEGIN, END, SENTINEL = 256, 257, 258  # the first sentinel; the others follow it


class Sizes(NamedTuple):
    """What every row of one configuration has in common, in tokens."""

    context: int
    hidden: int
    spans: int

    @property
    def source(self) -> int:
        """The length of the encoder's side."""
        return self.context - self.hidden + self.spans

    @property
    def target(self) -> int:
        """The length of the decoder's side."""
        return self.hidden + self.spans + 1


class Spans:
    """Rows of text with spans hidden."""

    def __init__(self, rows: Bytes, draws: Draws, sizes: Sizes) -> None:
        """Takes rows of the context's length.

        Shape:
            rows: [samples, context].
        """
        self.rows, self.draws, self.sizes = rows, draws, sizes

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, samples: NDArray[Any]) -> MicroBatch:
        rows = self.rows[samples].astype(np.int64)
        hidden = span_mask(self.draws.raw(samples, self.sizes.context), self.sizes)
        source, spans = _with_sentinels(rows, hidden, ~hidden), _with_sentinels(rows, hidden, hidden)
        begin, end = np.full((len(rows), 1), BEGIN), np.full((len(rows), 1), END)
        arrays = (np.hstack([begin, spans]), np.hstack([spans, end]), source)
        return MicroBatch(*(torch.from_numpy(x) for x in arrays))


def make(config: RunConfig) -> Task:
    """Returns the task, with a vocabulary of the 256 bytes, BEGIN, END and one sentinel for each span of a row.

    Its frequencies are by position. The first sentinel always begins the target and END always closes it, and to know
    that takes neither text nor context: at 64 tokens of context it is worth 0.6 nats.
    """
    corpus, context = corpus_of(config.data), config.model.context
    sizes = sizes_of(config)
    require(corpus, context, config.train.batch)

    def samples(split: Split) -> Spans:
        rows = rows_of(packed(corpus, split, context))[:, :-1]  # the last byte begins the next row
        return Spans(rows, Draws(config.seed, split), sizes)

    vocab = SENTINEL + sizes.spans
    told = {
        **corpus.facts(),
        "source_tokens_per_sample": sizes.source,
        "targets_per_sample": sizes.target,
        "spans_per_sample": sizes.spans,
        "special": f"begin {BEGIN}, end {END}, sentinels from {SENTINEL}",
    }
    return Task(
        "span", vocab, corpus.digest, samples("train"), samples("held_out"), frequencies_of(corpus.train, sizes), told
    )


def sizes_of(config: RunConfig) -> Sizes:
    """Returns how many tokens and spans are hidden in a row.

    Raises:
        ConfigError: so many that there are not enough visible tokens between them. The target side would then be longer
            than the context, too.
    """
    context, data = config.model.context, config.data
    hidden = hidden_tokens(context, data.noise)
    sizes = Sizes(context, hidden, max(1, round(hidden / data.span)))
    if sizes.target > context:
        raise ConfigError(
            f"data.noise: {data.noise:g} hides {hidden} of model.context={context} tokens, with data.span={data.span:g}"
            f" in {sizes.spans} spans; the target would be {sizes.target} tokens, more than model.context; lower"
            " data.noise or raise data.span or model.context",
            "data.noise",
        )
    return sizes


def frequencies_of(text: Bytes, sizes: Sizes) -> NDArray[np.float64]:
    """Returns how often each token is expected at each position of the target, over all ways to hide.

    Every byte of the text is as likely where no other token stands. Each position has as many counts as the text has
    bytes, so that adding one to each weighs no more than it does on the text itself.

    Shape:
        [target, vocab]
    """
    likely = np.zeros((sizes.target, SENTINEL + sizes.spans))
    likely[-1, END] = 1
    likely[:, SENTINEL:] = sentinel_places(sizes)
    likely[:, :256] = (1 - likely.sum(axis=1, keepdims=True)).clip(min=0) * np.bincount(text, minlength=256) / text.size
    return likely * text.size


def sentinel_places(sizes: Sizes) -> NDArray[np.float64]:
    """Returns the probability of each sentinel at each position of the target.

    A sentinel with k spans before it stands behind k sentinels and h bytes where h bytes are cut into k spans and the
    others into the other spans. That is so in C(h-1, k-1) C(hidden-h-1, spans-k-1) of C(hidden-1, spans-1) ways.

    Shape:
        [target, spans]
    """
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, sizes.hidden + 1)))])

    def log_choose(n: Any, k: int) -> Any:
        return log_factorial[n] - log_factorial[k] - log_factorial[n - k]

    places = np.zeros((sizes.target, sizes.spans))
    places[0, 0] = 1
    for k in range(1, sizes.spans):
        bytes_before = np.arange(k, sizes.hidden - sizes.spans + k + 1)  # no span on either side is empty
        ways = log_choose(bytes_before - 1, k - 1) + log_choose(sizes.hidden - bytes_before - 1, sizes.spans - k - 1)
        places[k + bytes_before, k] = np.exp(ways - log_choose(sizes.hidden - 1, sizes.spans - 1))
    return places


def span_mask(raw: Raw, sizes: Sizes) -> NDArray[np.bool_]:
    """Returns which tokens are hidden, in so many spans that do not touch; every way to do it is equally likely.

    Shape:
        raw: [B, context]; result [B, context].
    """
    n, cuts = sizes.spans, sizes.hidden - 1
    hidden = _pieces(raw[:, :cuts], n)
    # One more visible piece than spans, of which the first and the last may be empty: one token is lent to each.
    visible = _pieces(raw[:, cuts:], n + 1)
    visible[:, [0, -1]] -= 1
    pieces = np.stack([visible[:, :-1], hidden], axis=2).reshape(len(raw), 2 * n)
    turns = np.zeros((len(raw), sizes.context + 1), dtype=np.int64)
    np.put_along_axis(turns, np.cumsum(pieces, axis=1), 1, axis=1)
    within: NDArray[np.bool_] = np.cumsum(turns[:, :-1], axis=1) % 2 == 1
    return within


def _pieces(raw: Raw, n: int) -> NDArray[np.int64]:
    """Returns the lengths of n pieces, none empty, of as many items as there are raw numbers and one.

    Shape:
        raw: [B, items - 1]; result [B, n].
    """
    ends = np.nonzero(chosen(raw, n - 1))[1].reshape(len(raw), n - 1) + 1
    return np.diff(ends, axis=1, prepend=0, append=raw.shape[1] + 1)


def _with_sentinels(rows: NDArray[np.int64], hidden: NDArray[np.bool_], kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns the kept tokens of each row, with a sentinel where each hidden span begins.

    Shape:
        rows, hidden, kept: [B, T]; result [B, kept of a row + spans].
    """
    begins = hidden & ~np.pad(hidden, ((0, 0), (1, 0)))[:, :-1]
    sentinels = SENTINEL - 1 + np.cumsum(begins, axis=1)
    both = np.stack([sentinels, rows], axis=2)[np.stack([begins, kept], axis=2)]
    return both.reshape(len(rows), -1)
