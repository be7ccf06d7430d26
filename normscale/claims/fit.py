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

    Every (depth, seed) is one point. The interval is the wider of two. One takes the points for independent: n - 2
    degrees of freedom. But the seeds of a depth share what that depth deviates from a power law, and would be counted
    as so many confirmations of it. The other therefore takes the mean residuals of the depths, weighted by seeds: the
    line is the same, the degrees of freedom are the number of depths less two. Two depths have no interval, since
    they are on a line whatever the curve.

    The interval speaks of other seeds and of how well a power law fits, not of other texts: all runs are measured on
    the same batch.
    """
    if len(set(x)) < 2 or not all(value > 0 and math.isfinite(value) for value in y):
        return None
    log_x, log_y = np.log(np.asarray(x, dtype=float)), np.log(np.asarray(y, dtype=float))
    centred = log_x - log_x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ log_y) / spread
    intercept = float(log_y.mean() - slope * log_x.mean())
    residuals = log_y - intercept - slope * log_x
    depths, at, seeds = np.unique(log_x, return_inverse=True, return_counts=True)
    if len(depths) < 3:
        return Line(Estimate(slope), intercept)
    shared = np.bincount(at, residuals) / seeds
    pooled = _half_width(float(residuals @ residuals), len(log_x) - 2, spread)
    by_depth = _half_width(float(seeds @ shared**2), len(depths) - 2, spread)
    half = max(pooled, by_depth)
    return Line(Estimate(slope, slope - half, slope + half), intercept)


def ratio(x: Sequence[float], y: Sequence[float]) -> Estimate | None:
    """Returns the geometric mean of the ratios y, one for each (depth, seed); None where one of them is not positive.

    The interval is the wider of two, for the reason that `power_law` gives: over all ratios, and over the mean
    logarithms of the depths. One depth has the first alone.
    """
    if not y or not all(value > 0 and math.isfinite(value) for value in y):
        return None
    logs = np.log(np.asarray(y, dtype=float))
    depths, at, seeds = np.unique(np.asarray(x, dtype=float), return_inverse=True, return_counts=True)
    centre = float(logs.mean())
    if len(logs) < 2:
        return Estimate(math.exp(centre))
    half = t_quantile(len(logs) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    if len(depths) > 1:
        shared = np.bincount(at, logs - centre) / seeds
        squares = float(seeds @ shared**2) / (len(depths) - 1)
        half = max(half, t_quantile(len(depths) - 1) * math.sqrt(squares / len(logs)))
    return Estimate(math.exp(centre), math.exp(centre - half), math.exp(centre + half))


def _half_width(squares: float, dof: int, spread: float) -> float:
    """Returns half the 95 % interval of a slope from its squared residuals and the squared spread of x."""
    return t_quantile(dof) * math.sqrt(squares / dof / spread)
