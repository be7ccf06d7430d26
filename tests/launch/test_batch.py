"""What is asked of Slurm (what it cannot be asked is in test_main.py)."""

import pytest

from launch.batch import minutes


@pytest.mark.parametrize(
    ("limit", "found"),
    [("90", 90), ("90:30", 90), ("1:30:00", 90), ("1-0", 1440), ("1-12:30", 2190), ("2-1:0:0", 2940)],
)
def test_time_limits(limit: str, found: int):
    assert minutes(limit) == found
