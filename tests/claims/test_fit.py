import numpy as np
import pytest

from normscale.claims.fit import mean, power_law, t_quantile


def test_a_power_law_gives_back_its_slope() -> None:
    line = power_law([6, 12, 24, 48], [3 * depth**0.5 for depth in (6, 12, 24, 48)])
    assert line is not None
    assert line.slope.value == pytest.approx(0.5)
    assert line.slope.hi == pytest.approx(line.slope.lo, abs=1e-6)
    assert line.at(100) == pytest.approx(30)


def test_the_interval_of_a_slope_covers_the_truth_in_95_of_100_cases() -> None:
    noise = np.random.default_rng(0)
    depths = np.array([6, 12, 24, 48, 96] * 3)
    hits = 0
    for _ in range(1000):
        line = power_law(depths.tolist(), (depths**0.3 * np.exp(0.2 * noise.standard_normal(15))).tolist())
        assert line is not None
        assert line.slope.lo is not None
        assert line.slope.hi is not None
        hits += line.slope.lo <= 0.3 <= line.slope.hi
    assert hits == pytest.approx(950, abs=25)


def test_the_interval_of_a_mean_is_students() -> None:
    found = mean([1.0, 2.0, 3.0])
    assert (found.value, found.lo, found.hi) == pytest.approx((2, 2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), rel=1e-4)
    assert mean([1.0]).lo is None


def test_what_has_no_slope_has_none() -> None:
    assert power_law([6, 6, 6], [1, 2, 3]) is None
    assert power_law([6, 12, 24], [1, 0, 3]) is None
    assert power_law([6, 12, 24], [1, float("nan"), 3]) is None
    two = power_law([6, 12], [1, 2])
    assert two is not None
    assert (two.slope.value, two.slope.lo) == (pytest.approx(1), None)


def test_t_quantiles_are_those_of_the_printed_table() -> None:
    assert [t_quantile(n) for n in (1, 13, 30)] == pytest.approx([12.706, 2.160, 2.042], abs=1e-3)
