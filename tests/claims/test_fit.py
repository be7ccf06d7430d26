import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import linregress

from normscale.claims.fit import Estimate, mean, power_law, ratio, t_quantile


def test_a_power_law_gives_back_its_slope() -> None:
    line = power_law([6, 12, 24, 48], [3 * depth**0.5 for depth in (6, 12, 24, 48)])
    assert line is not None
    assert line.slope.value == pytest.approx(0.5)
    assert line.slope.hi == pytest.approx(line.slope.lo, abs=1e-6)
    assert line.at(100) == pytest.approx(30)


CPU_GRID = np.repeat([6, 12, 24, 48, 96], [3, 3, 3, 2, 2])
SEED = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 0, 1])


def covered(noise: Callable[[np.random.Generator], Any], draws: int = 1000) -> tuple[float, float]:
    """Returns how often the interval of a slope of 0.3 holds it, and the median width of the interval."""
    generator, hits, widths = np.random.default_rng(0), 0, []
    for _ in range(draws):
        line = power_law(CPU_GRID.tolist(), (CPU_GRID**0.3 * np.exp(noise(generator))).tolist())
        assert line is not None
        assert line.slope.lo is not None
        assert line.slope.hi is not None
        hits += line.slope.lo <= 0.3 <= line.slope.hi
        widths.append(line.slope.hi - line.slope.lo)
    return hits / draws, float(np.median(widths))


def test_seeds_that_share_the_deviation_of_their_depth_are_not_counted_as_independent() -> None:
    at = np.unique(CPU_GRID, return_inverse=True)[1]
    shared, _ = covered(lambda g: 0.1 * g.standard_normal(5)[at] + 0.01 * g.standard_normal(13))
    mixed, _ = covered(lambda g: 0.1 * g.standard_normal(5)[at] + 0.1 * g.standard_normal(13))
    assert 0.93 <= shared <= 0.98  # the points taken for independent: 0.68
    assert 0.93 <= mixed <= 0.98


def test_a_seed_that_draws_alike_at_every_depth_is_covered() -> None:
    """The deepest cells lack the third seed; a fit of the means alone would take its absence for a slope (0.84)."""
    coverage, _ = covered(lambda g: 0.1 * g.standard_normal(3)[SEED] + 0.02 * g.standard_normal(13))
    assert coverage >= 0.95


def test_independent_noise_widens_the_interval_little() -> None:
    coverage, width = covered(lambda g: 0.1 * g.standard_normal(13))
    log_x = np.log(CPU_GRID)
    exact = 2 * t_quantile(11) * 0.1 / float(np.sqrt(((log_x - log_x.mean()) ** 2).sum()))
    assert 0.95 <= coverage <= 0.995
    assert exact < width < 1.6 * exact


def test_one_seed_a_depth_gives_the_textbook_interval() -> None:
    x, y = [6, 12, 24, 48], [1.0, 2.1, 3.7, 8.2]
    line, textbook = power_law(x, y), linregress(np.log(x), np.log(y))
    assert line is not None
    half = t_quantile(2) * textbook.stderr
    assert (line.slope.lo, line.slope.hi) == pytest.approx((textbook.slope - half, textbook.slope + half))


def test_the_interval_of_a_mean_is_students() -> None:
    found = mean([1.0, 2.0, 3.0])
    assert (found.value, found.lo, found.hi) == pytest.approx((2, 2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), rel=1e-4)
    assert mean([1.0]).lo is None


def test_what_has_no_slope_has_none() -> None:
    assert power_law([6, 6, 6], [1, 2, 3]) is None
    assert power_law([6, 12, 24], [1, 0, 3]) is None
    assert power_law([6, 12, 24], [1, float("nan"), 3]) is None
    for x, y in (([6, 12], [1, 2]), ([6, 6, 12, 12], [1.1, 1 / 1.1, 2.2, 2 / 1.1])):
        two = power_law(x, y)  # type: ignore[arg-type]
        assert two is not None
        assert (two.slope.value, two.slope.lo) == (pytest.approx(1), None)


def test_t_quantiles_are_those_of_the_printed_table() -> None:
    assert [t_quantile(n) for n in (1, 13, 30)] == pytest.approx([12.706, 2.160, 2.042], abs=1e-3)


def test_a_ratio_is_a_geometric_mean_with_the_wider_of_two_intervals() -> None:
    same = ratio([6, 6, 12, 12], [2.0, 8.0, 2.0, 8.0])  # the seeds differ, the depths do not
    assert same is not None
    assert same.value == pytest.approx(4.0)
    half = t_quantile(3) * math.log(2) * math.sqrt(4 / 3) / 2
    assert same.hi == pytest.approx(4.0 * math.exp(half))
    apart = ratio([6, 6, 12, 12], [2.0, 2.0, 8.0, 8.0])  # two seeds that say the same are no confirmation
    assert apart is not None
    assert apart.hi == pytest.approx(4.0 * math.exp(t_quantile(1) * math.log(2)))
    assert ratio([6], [2.0]) == Estimate(pytest.approx(2.0))
    assert ratio([], []) is None
    assert ratio([6, 12], [1.0, 0.0]) is None
    assert ratio([6, 12], [1.0, float("nan")]) is None
