import math

import pytest

from normscale.claims.state import drop_over_last_third, state_of, unrecovered_rise
from tests.claims.synthetic import UNIGRAM, record, series


@pytest.mark.parametrize(
    ("gap", "improves", "label"),
    [
        (0.8, 0.1, "trained"),
        (0.2, 0.0, "trained"),  # exactly at the threshold is trained
        (0.199, 0.0, "undecided"),
        (0.15, 0.0, "undecided"),  # neither at the unigram entropy nor trained
        (0.0, 0.0, "stuck"),
        (-0.4, 0.0, "stuck"),  # above the unigram entropy and standing still
        (0.099, 0.019, "stuck"),
        (0.1, 0.0, "undecided"),
        (0.0, 0.02, "undecided"),  # exactly 0.02 is not less than 0.02
        (0.0, 0.0199, "stuck"),
        (-0.4, 0.3, "undecided"),  # still learning
        (-0.04, 0.025, "stuck"),  # creeping towards the unigram entropy: as much again, three times, ends at 0.035
        (-0.01, 0.0366, "stuck"),
        (-0.01, 0.0367, "undecided"),
        (-0.1, 0.03, "undecided"),  # not there yet
        (-0.05, 0.6, "undecided"),  # on its way past
        (0.001, 0.025, "undecided"),  # below it, everything counts
        (0.0, -0.1, "stuck"),  # getting worse is not improving
    ],
)
def test_thresholds(gap: float, improves: float, label: str) -> None:
    assert state_of(record(gap, improves)).label == label


def test_a_run_that_stopped_on_nan_diverged() -> None:
    state = state_of(record(0.9, 0.1, outcome="nan"))
    assert (state.label, state.dead) == ("diverged", True)
    assert "step 17" in state.why
    made = record(0.9)
    made.series["loss_val"].values[-1] = math.inf
    assert state_of(made).label == "diverged"


@pytest.mark.parametrize("outcome", ["error", "interrupted"])
def test_a_run_without_an_end_of_its_own_is_no_measurement(outcome: str) -> None:
    assert state_of(None).label == "missing"
    state = state_of(record(0.9, outcome=outcome))
    assert (state.label, state.dead) == ("missing", False)
    unfinished = record(0.9)
    unfinished.end = None
    assert state_of(unfinished).label == "missing"


def test_a_spike_that_stays_is_a_divergence_and_one_that_passes_is_none() -> None:
    stays = {step: 2.4 if step < 100 else 3.1 for step in range(0, 181, 10)}
    assert state_of(record(0.5, training=stays)).label == "diverged"
    passes = {step: 9.0 if step == 100 else 2.4 for step in range(0, 181, 10)}
    assert state_of(record(0.8, training=passes)).label == "trained"
    assert unrecovered_rise(series({step: 5.0 - 0.01 * step for step in range(180)})) == 0.0


@pytest.mark.parametrize(
    ("bad", "label"),
    [
        ((), "trained"),
        ((180,), "diverged"),  # the last step was not applied
        ((120,), "diverged"),  # the last third begins here
        ((119,), "trained"),
        ((3, 130), "diverged"),
        (tuple(range(160, 181)), "diverged"),
    ],
)
def test_a_run_that_skipped_steps_of_its_last_third_has_not_trained(bad: tuple[int, ...], label: str) -> None:
    """A skipped step is recorded whenever it comes, the others every ten steps."""
    steps = sorted({1, *range(10, 181, 10), *bad})
    training = {step: math.nan if step in bad else 2.4 for step in steps}
    flagged, unflagged, told = (record(0.9, training=training) for _ in range(3))
    flagged.series["nonfinite"] = series({step: float(step in bad) for step in steps})
    told.events = [{"kind": "event", "step": step, "event": "nonfinite"} for step in bad]
    told.series["loss_train"] = series(dict.fromkeys(steps, 2.4))
    for made in (flagged, unflagged, told):
        state = state_of(made)
        assert state.label == label
        assert label == "trained" or state.why == f"not finite at step {max(bad)}, in the last third of the run"


def test_a_gradient_that_is_not_finite_counts_as_a_loss_does() -> None:
    made = record(0.9)  # every loss is finite
    made.series["nonfinite"] = series({step: float(step == 170) for step in range(0, 181, 10)})
    assert state_of(made).label == "diverged"


def test_without_several_held_out_losses_the_training_loss_says_whether_it_moves() -> None:
    moving = {step: 4.0 - step / 180 for step in range(0, 181, 10)}
    made = record(0.0, training=moving)
    made.series["loss_val"] = series({0: 5.6, 180: UNIGRAM})
    state = state_of(made)
    assert state.label == "undecided"
    assert state.improved == pytest.approx(1 / 3)


def test_the_drop_is_that_of_a_line_through_the_last_third() -> None:
    assert drop_over_last_third(series({0: 9.0, 60: 5.0, 120: 3.0, 150: 2.9, 180: 2.8})) == pytest.approx(0.2)
    assert drop_over_last_third(series({0: 9.0, 150: 2.9, 180: 2.8})) == pytest.approx(0.2)
    assert drop_over_last_third(series({0: 9.0, 180: 2.8})) is None
    assert drop_over_last_third(series({})) is None
