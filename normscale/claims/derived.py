"""Numbers that follow from what a run recorded: what it tolerated, what it kept on held-out text."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from normscale.tracking.reader import RunRecord
from normscale.tracking.record import TRAINED_NATS

RATE_TOLERATED = "rate_tolerated"  # the name of that number

SMOOTHED = 5
"""Evaluations, whose median stands for the middle one: of a thousand tokens each, they lie 0.1 nats apart."""


def rate_tolerated(record: RunRecord) -> float | None:
    """Returns the largest learning rate at which a run, whose rate only rises, still stood where it had come to.

    Keel notes the rate one step before a run diverges, which is when its loss stagnates, spikes and never comes back,
    or grows and grows. In each the held-out loss leaves for good what the run had reached. So this is the rate at the
    last evaluation whose loss is that of a trained model (`TRAINED_NATS` below the unigram entropy) and at most as much
    above the lowest so far. A run that came to no such loss has 0: nothing was learnt that a rate could have destroyed.
    One that stands at its end has the largest rate of its ramp, a lower bound.

    Reference: Chen and Wei 2026 (Keel), arXiv:2601.19895, section 5.1.
    """
    gaps, rates = record.series.get("loss_gap"), record.series.get("lr")
    if gaps is None or rates is None or not gaps.values or not rates.values:
        return None
    values = _smooth([value if math.isfinite(value) else -math.inf for value in gaps.values])
    standing = (values >= TRAINED_NATS) & (values >= np.maximum.accumulate(values) - TRAINED_NATS)
    if not standing.any():
        return 0.0
    last = int(np.flatnonzero(standing)[-1])
    place = min(bisect_left(rates.steps, gaps.steps[last]), len(rates.values) - 1)
    return rates.values[place]


def _smooth(values: Sequence[float]) -> NDArray[np.float64]:
    """Returns the running median, over fewer at both ends; where two are in the middle, the lower one."""
    side = SMOOTHED // 2
    windows = (sorted(values[max(0, at - side) : at + side + 1]) for at in range(len(values)))
    return np.array([window[(len(window) - 1) // 2] for window in windows])


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
    RATE_TOLERATED: rate_tolerated,
    "unseen_loss": unseen_loss,
    "branch_grown": branch_grown,
}
"""By name, as a `Value` asks for them."""
