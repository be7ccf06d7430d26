"""What a monitored step tells its loop."""

from dataclasses import dataclass
from typing import Literal

from normscale.probes.culprit import Culprit

Reason = Literal[
    "applied",
    "accumulating",
    "non-finite loss",
    "non-finite gradient",
    "norm overflow",
    "loss scale overflow",
    "skipped by the engine",
    "applied although not finite",
]


@dataclass(frozen=True)
class StepReport:
    """What came of one call of `Monitor.step`.

    Attributes:
        step: number of the attempted step, from 1.
        applied: whether the optimizer changed the parameters. Step a learning-rate scheduler only where it did.
        reason: why it was applied or not; "accumulating" where the window of micro-batches is not complete yet.
        loss: the loss as it was handed over; None while accumulating.
        grad_norm: L2 norm of the whole gradient before clipping; None where it was not measured or cannot be had.
        culprit: the first value that was not finite, the same on every rank; None where there is none, or unknown.
        in_a_row: steps in a row that were not finite, this one included.
        measured: whether the step's statistics went into the records.
    """

    step: int
    applied: bool
    reason: Reason
    loss: float | None = None
    grad_norm: float | None = None
    culprit: Culprit | None = None
    in_a_row: int = 0
    measured: bool = False
