"""Means and slopes with 95 % intervals, for a handful of runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student_t


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; `lo` and `hi` are None where there are too few runs for one."""

    value: float
    lo: float | None = None
    hi: float | None = None


@dataclass(frozen=True)
class Line:
    """y = exp(intercept) * x^slope, fitted in the logarithms."""

    slope: Estimate
    intercept: float

    def at(self, x: float) -> float:
        return math.exp(self.intercept + self.slope.value * math.log(x))


def t_quantile(dof: int) -> float:
    """Returns the 97.5 % point of Student's t."""
    return float(student_t.ppf(0.975, dof))


def mean(values: Sequence[float]) -> Estimate:
    """Returns the mean over seeds with its t interval; one value has no interval."""
    centre = float(np.mean(values))
    if len(values) < 2:
        return Estimate(centre)
    half = t_quantile(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(centre, centre - half, centre + half)


def power_law(x: Sequence[float], y: Sequence[float]) -> Line | None:
    """Returns the least-squares line of log y over log x; None with fewer than two different x or a y not positive.

    Every (depth, seed) is one point: a run of another depth has other weights, so the points are independent. A curve
    that is no power law leaves residuals, which widen the interval: as they should, for the slope then depends on
    which depths were measured. The interval needs three points.
    """
    if len(set(x)) < 2 or not all(value > 0 and math.isfinite(value) for value in y):
        return None
    log_x, log_y = np.log(np.asarray(x, dtype=float)), np.log(np.asarray(y, dtype=float))
    centred = log_x - log_x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ log_y) / spread
    intercept = float(log_y.mean() - slope * log_x.mean())
    dof = len(log_x) - 2
    if dof < 1:
        return Line(Estimate(slope), intercept)
    residuals = log_y - intercept - slope * log_x
    half = t_quantile(dof) * math.sqrt(float(residuals @ residuals) / dof / spread)
    return Line(Estimate(slope, slope - half, slope + half), intercept)
