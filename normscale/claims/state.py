"""What became of one run: trained, stuck, diverged, undecided, or missing. Pure functions of its record.

All thresholds are in nats per target and compare the run with the unigram entropy of its own held-out text, which a
model reaches that has learnt how often each byte occurs and nothing else.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from normscale.tracking.reader import RunRecord, Series
from normscale.tracking.record import ROUNDING, has_trained

Label = Literal["trained", "stuck", "diverged", "undecided", "missing"]

AT_UNIGRAM = 0.1
"""Half of what it takes to have trained: a few thousand held-out bytes can differ by this from the whole split without
any learning."""

STANDSTILL = 0.02
"""A run at the unigram entropy is stuck when it improves by less than this over the last third of its steps.

One that is still above it and creeps towards it improves by a little more without learning anything but frequencies. It
is stuck, too, when as many steps again at that rate, which in truth falls, would leave it within `AT_UNIGRAM`."""

SPIKE = 0.5
"""A training loss that ends further than this above its lowest earlier level has spiked and not come back. Means over a
sixth of a run differ by about 0.1 nats from one batch of text to another."""


@dataclass(frozen=True)
class State:
    """What became of a run, the numbers that say so, and a line of words for a reader."""

    label: Label
    why: str
    loss: float | None = None
    gap: float | None = None
    improved: float | None = None

    @property
    def dead(self) -> bool:
        return self.label in ("stuck", "diverged")


def state_of(record: RunRecord | None) -> State:
    """Returns what became of a run; a run without an end of its own is missing, which is no measurement."""
    if record is None:
        return State("missing", "no record")
    if not record.finished:
        outcome = (record.end or {}).get("outcome", "unfinished")
        return State("missing", f"it did not come to its end ({outcome})")
    if (record.end or {}).get("outcome") == "nan":
        step = record.summary.get("bad_step", -1)
        return State("diverged", f"not finite at step {step}", math.nan, math.nan)
    held_out = record.series.get("loss_val", Series())
    unigram = record.start.get("data", {}).get("unigram_nats", record.summary.get("unigram_nats"))
    if not held_out.values or unigram is None:
        return State("undecided", "no held-out loss was recorded")
    loss = held_out.values[-1]
    if not math.isfinite(loss):
        return State("diverged", "the held-out loss is not finite", math.nan, math.nan)
    gap = float(unigram) - loss
    training = record.series.get("loss_train", Series())
    improved = drop_over_last_third(held_out)
    if improved is None:
        improved = drop_over_last_third(training)
    if (step := late_non_finite_step(record)) is not None:
        return State("diverged", f"not finite at step {step}, in the last third of the run", loss, gap, improved)
    if (rise := unrecovered_rise(training)) > SPIKE:
        return State("diverged", f"the training loss ends {rise:.2f} nats above where it was", loss, gap, improved)
    if has_trained(gap):
        return State("trained", f"{gap:.2f} nats below the unigram entropy", loss, gap, improved)
    moving = "an unknown amount" if improved is None else f"{improved:.3f} nats"
    side = "below" if gap >= 0 else "above"
    where = f"{abs(gap):.3f} nats {side} the unigram entropy, improving by {moving} over the last third"
    still = improved is not None and gap < AT_UNIGRAM and improved < STANDSTILL - ROUNDING
    creeps = improved is not None and -AT_UNIGRAM < gap < 0 and gap + 3 * improved < AT_UNIGRAM - ROUNDING
    return State("stuck" if still or creeps else "undecided", where, loss, gap, improved)


def late_non_finite_step(record: RunRecord) -> int | None:
    """Returns the last step of the run's last third whose loss or gradient was not finite; None where all were.

    Such a step is skipped where the configuration says so, and every one is recorded. A loss that is finite again
    by the end does not show it, and a loss that is not is no point of any curve.
    """
    flags, losses = (record.series.get(key, Series()) for key in ("nonfinite", "loss_train"))
    bad = {step for step, flag in zip(flags.steps, flags.values, strict=True) if flag != 0}
    bad |= {step for step, loss in zip(losses.steps, losses.values, strict=True) if not math.isfinite(loss)}
    bad |= {event["step"] for event in record.events if event["event"] == "nonfinite"}
    last = record.summary.get("steps") or max(flags.steps + losses.steps, default=0)
    return max((step for step in bad if 3 * step >= 2 * last), default=None)


def drop_over_last_third(series: Series) -> float | None:
    """Returns how much a loss fell over the last third of the run, by a straight line through that third's points.

    None when the third holds fewer than two finite points.
    """
    if not series.steps:
        return None
    last = series.steps[-1]
    pairs = zip(series.steps, series.values, strict=True)
    points = [(step, value) for step, value in pairs if 3 * step >= 2 * last and math.isfinite(value)]
    if len(points) < 2:
        return None
    x, y = np.array(points, dtype=float).T
    x -= x.mean()
    return float(-(x @ y) / (x @ x) * last / 3)


def unrecovered_rise(series: Series) -> float:
    """Returns how far the last sixth of a training loss lies above the lowest sixth before it; 0 where it is lower."""
    values = np.array([value for value in series.values if math.isfinite(value)])
    width = max(1, len(values) // 6)
    if len(values) < 2 * width:
        return 0.0
    smooth = np.convolve(values, np.full(width, 1 / width), mode="valid")
    return max(0.0, float(smooth[-1] - smooth[:-width].min()))
