"""Numbers that follow from a run's records: each way to diverge on a ramp, and what is lost on held-out text."""

import math

import pytest

from normscale.claims.claim import Cell
from normscale.claims.derived import branch_grown, rate_tolerated, unseen_loss
from normscale.claims.results import Result
from normscale.tracking.reader import RunRecord
from tests.claims.synthetic import record, series

EVERY, TOP = 10, 1e-2


def ramp(gaps: list[float], outcome: str = "finished") -> RunRecord:
    """Returns a run whose rate rises in a line to `TOP`, with a held-out gap at the beginning and every 10 steps."""
    steps = EVERY * (len(gaps) - 1)
    made = record(outcome=outcome, steps=steps)
    made.series["loss_gap"] = series({EVERY * place: gap for place, gap in enumerate(gaps)})
    made.series["lr"] = series({step: TOP * step / steps for step in (1, *range(EVERY, steps + 1, EVERY))})
    return made


LEARNS = [-3.0, 0.3, 0.6, 0.8]
NAN = math.nan


@pytest.mark.parametrize(
    ("gaps", "share"),
    [
        ([*LEARNS, *[0.8] * 7], 1.0),  # it has learnt what it will, and stands
        ([*LEARNS, 0.7, 1.1, 0.7, 0.8, 0.7, 0.9, 0.7], 1.0),  # one evaluation beside the others says nothing
        ([*LEARNS, 0.8, 0.8, 0.8, -0.1, -0.1, -0.1, -0.1], 6 / 10),  # it stagnates at frequencies
        ([*LEARNS, 0.8, 0.8, -2.0, -2.0, -2.0, 0.1, 0.4, 0.5, 0.5], 5 / 12),  # it spikes and does not come back
        ([*LEARNS, 0.8, 0.8, -2.0, -2.0, -2.0, 0.4, 0.7, 0.8, 0.8], 1.0),  # it comes back
        ([*LEARNS, 0.75, 0.7, 0.65, 0.45, 0.35, 0.3, 0.25], 6 / 10),  # it gets worse and worse
        ([*LEARNS, 0.8, 0.8, 0.8, 0.8, NAN, NAN, NAN], 7 / 10),
        ([-3.0, 0.3, 0.35, 0.3, 0.15, 0.15, 0.15, 0.15, 0.15], 3 / 8),  # near its best, but trained no more
        ([-3.0, *[0.0, 0.1, 0.15, 0.0] * 3], 0.0),  # it never learns
    ],
)
def test_the_rate_is_the_last_at_which_a_run_stands_where_it_had_come(gaps: list[float], share: float) -> None:
    assert rate_tolerated(ramp(gaps)) == pytest.approx(share * TOP)


def test_a_run_that_broke_off_tolerated_what_it_had_reached() -> None:
    made = ramp([*LEARNS, *[0.8] * 7], outcome="nan")
    made.series["loss_gap"] = series({0: -3.0, 10: 0.3, 20: 0.6, 30: 0.8, 40: 0.8})
    found = Result(Cell("pre", 2, 0, TOP, "main"), made).number("rate_tolerated")
    assert found == pytest.approx(4 / 10 * TOP)


def test_without_a_rate_or_a_loss_nothing_follows() -> None:
    assert rate_tolerated(record()) is None
    made = ramp([-3.0, 0.5])
    del made.series["loss_gap"], made.series["loss_val"]
    assert rate_tolerated(made) is None
    assert unseen_loss(made) is None


def test_what_is_lost_on_held_out_text_is_over_the_last_sixth_of_training() -> None:
    made = record(gap=1.0, training={step: 9.0 if step < 50 else 2.0 for step in range(60)})
    assert unseen_loss(made) == pytest.approx(made.series["loss_val"].values[-1] - 2.0)
    assert math.isnan(unseen_loss(record(outcome="nan")) or 0.0)


def test_branches_have_grown_where_the_end_is_above_the_beginning() -> None:
    made = record(layers={"branch_ratio": [[0.1, 0.2, 0.1, 0.1], [0.9, 0.9, 0.9, 0.9], [0.2, 0.1, 0.3, 0.4]]})
    assert branch_grown(made) == 0.75  # of the last record, not of the largest
    assert branch_grown(record(layers={"branch_ratio": [[0.1, 0.2]]})) is None
    assert branch_grown(record()) is None
    assert math.isnan(branch_grown(record(outcome="nan")) or 0.0)
