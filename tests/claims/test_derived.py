"""Numbers that follow from a run's records: each way to diverge on a ramp, and what is lost on held-out text."""

import math

import pytest

from normscale.claims.claim import Cell
from normscale.claims.derived import branch_grown, rate_tolerated, unseen_loss
from normscale.claims.results import Result
from normscale.tracking.reader import RunRecord
from tests.claims.synthetic import record, series

EVERY, TOP = 10, 1e-2


def ramp(losses: list[float], outcome: str = "finished") -> RunRecord:
    """Returns a run whose rate rises in a line to `TOP`, with a held-out loss at the beginning and every 10 steps."""
    steps = EVERY * (len(losses) - 1)
    made = record(outcome=outcome, steps=steps)
    made.series["loss_val"] = series({EVERY * place: loss for place, loss in enumerate(losses)})
    made.series["lr"] = series({step: TOP * step / steps for step in (1, *range(EVERY, steps + 1, EVERY))})
    return made


@pytest.mark.parametrize(
    ("losses", "share"),
    [
        ([5.0, 4.0, 3.0, 3.0, 3.0, 3.0], 2 / 5),  # it stagnates
        ([5.0, 4.0, 3.0, 6.0, 4.0, 3.5], 2 / 5),  # it spikes and does not come back
        ([5.0, 4.0, 3.0, 6.0, 3.1, 2.5], 1.0),  # it comes back below
        ([5.0, 4.0, 3.0, 3.2, 3.4, 3.6], 2 / 5),  # it gets worse and worse
        ([5.0, 4.0, 3.0, 2.98, 2.97, 2.96], 2 / 5),  # less than 0.05 nats is no progress
        ([5.0, 4.0, 3.0, 2.9, 2.8, 2.7], 1.0),  # it gets better to the end
        ([5.0, 4.0, 3.0, math.nan, math.nan, math.nan], 2 / 5),
        ([5.0, 5.0, 5.0, 5.0, 5.0, 5.0], 1 / 50),  # it never learns: the rate of the first step
    ],
)
def test_the_rate_is_that_of_the_last_progress(losses: list[float], share: float) -> None:
    assert rate_tolerated(ramp(losses)) == pytest.approx(share * TOP)


def test_a_run_that_broke_off_tolerated_what_it_had_reached() -> None:
    made = ramp([5.0, 4.0, 3.0, 2.5, 2.4, 2.3], outcome="nan")
    made.series["loss_val"] = series({0: 5.0, 10: 4.0, 20: 3.0})
    found = Result(Cell("pre", 2, 0, TOP, "main"), made).number("rate_tolerated")
    assert found == pytest.approx(2 / 5 * TOP)


def test_without_a_rate_or_a_loss_nothing_follows() -> None:
    assert rate_tolerated(record()) is None
    made = ramp([5.0, 4.0])
    del made.series["loss_val"]
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
