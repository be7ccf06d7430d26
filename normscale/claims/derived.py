"""Numbers that follow from what a run recorded: what it tolerated, what it kept on held-out text."""

import math
from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from normscale.tracking.reader import RunRecord

PROGRESS = 0.05
"""Nats of held-out loss: a run has come further only when it falls by more than this. Evaluations of one run are on the
same text, but its loss goes up and down by hundredths from step to step."""


def rate_tolerated(record: RunRecord) -> float | None:
    """Returns the learning rate at which a run, whose rate only rises, made its last progress.

    Keel calls a run divergent at the first of three things: its loss stagnates; it spikes and never comes back below
    the level before the spike; it gets worse and worse. In all of them the loss never again falls below where it was.
    So this is the rate at the first evaluation below which no later one lies by over `PROGRESS`, which a run that is
    not finite ends. A run that gets better until its end gives nearly the largest rate of its ramp: a lower bound.

    Reference: Chen and Wei 2026 (Keel), arXiv:2601.19895, section 5.1.
    """
    losses, rates = record.series.get("loss_val"), record.series.get("lr")
    if losses is None or rates is None or not losses.values or not rates.values:
        return None
    values = np.array([value if math.isfinite(value) else math.inf for value in losses.values])
    later = np.append(np.minimum.accumulate(values[::-1])[::-1][1:], math.inf)  # the best that is still to come
    last = int(np.argmax(later >= values - PROGRESS))  # an infinite loss is no progress either
    place = min(bisect_left(rates.steps, losses.steps[last]), len(rates.values) - 1)
    return rates.values[place]


def unseen_loss(record: RunRecord) -> float | None:
    """Returns by how much the held-out loss at the end is above the training loss of the last sixth of the steps.

    NaN where the run broke off before.
    """
    if record.end is not None and record.end.get("outcome") == "nan":
        return math.nan
    held_out, training = record.series.get("loss_val"), record.series.get("loss_train")
    if held_out is None or training is None or not held_out.values or not training.values:
        return None
    return held_out.values[-1] - float(np.mean(training.values[-max(1, len(training.values) // 6) :]))


def branch_grown(record: RunRecord) -> float | None:
    """Returns the share of sublayers whose branch is larger beside the stream at the end than at the beginning.

    NaN where the run broke off before.
    """
    if record.end is not None and record.end.get("outcome") == "nan":
        return math.nan
    ratios = record.profiles.get("branch_ratio")
    if ratios is None or len(ratios.data) < 2:
        return None
    return float(np.mean(ratios.data[-1] > ratios.data[0]))


DERIVED: dict[str, Callable[[RunRecord], float | None]] = {
    "rate_tolerated": rate_tolerated,
    "unseen_loss": unseen_loss,
    "branch_grown": branch_grown,
}
"""By name, as a `Value` asks for them."""
