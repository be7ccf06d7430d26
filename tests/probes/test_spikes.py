"""The spike score, against plain numpy."""

import json
import math

import numpy as np
import pytest

from normscale.probes.spikes import SpikeScore
from tests.probes.test_probes import Notes, windows
from tests.train.test_loop import poisoned, trainer


def twin(values: list[float], sigmas: float, window: int) -> list[bool]:
    """Which values are spikes, by a loop over slices."""
    spikes = []
    for i, value in enumerate(values):
        past = np.array([x for x in values[:i] if math.isfinite(x)][-window:])
        far = len(past) >= min(30, window) and abs(value - past.mean()) >= max(sigmas * past.std(), 1e-300)
        spikes.append(not math.isfinite(value) or bool(far and abs(value - past.mean()) > 1e-4 * abs(past.mean())))
    return spikes


@pytest.mark.parametrize(("sigmas", "window"), [(6.0, 128), (2.0, 20), (3.0, 50)])
def test_it_is_that_of_plain_numpy(sigmas: float, window: int) -> None:
    draws = np.random.default_rng(0).standard_t(2, size=400)  # heavy tails
    values = [*(5 + draws[:200]).tolist(), math.nan, *(5 + draws[200:]).tolist(), -math.inf, 5.0]
    score = SpikeScore(sigmas, window)
    found = [score.add(value) for value in values]
    assert found == twin(values, sigmas, window)
    assert 3 < score.spikes == sum(found) < 100
    assert score.score == sum(found) / len(values)
    assert len(score.past) == window


@pytest.mark.parametrize(
    ("before", "value", "spike"),
    [(40, 16, True), (40, 15.9, False), (40, 4, True), (40, 4.1, False), (30, 16, True), (28, 16, False)],
)
def test_six_deviations_up_or_down_after_the_warm_up(before: int, value: float, spike: bool) -> None:
    score = SpikeScore()
    for i in range(before):
        assert not score.add(10.0 + (-1) ** i)  # mean 10, deviation 1
    assert score.add(value) is spike
    if before > 28:
        assert score.distance == pytest.approx(abs(value - 10))


def test_values_that_left_the_window_count_no_more() -> None:
    score = SpikeScore(window=40)
    for i in range(100):
        score.add(1000.0 * (-1) ** i)
    for i in range(40):
        score.add(10.0 + (-1) ** i)
    assert score.add(17.0)


def test_a_window_shorter_than_the_warm_up_still_sees_spikes() -> None:
    score = SpikeScore(window=10)
    for i in range(10):
        score.add(10.0 + (-1) ** i)
    assert score.add(20.0)


def test_rounding_and_a_constant_are_no_spikes() -> None:
    score = SpikeScore()
    for i in range(60):
        assert not score.add(3.0 + 1e-9 * i)
    zeros = SpikeScore()
    assert not any(zeros.add(0.0) for _ in range(60))


def test_it_goes_on_in_mid_window() -> None:
    values = np.random.default_rng(1).standard_t(2, size=300).tolist()
    whole, first, second = (SpikeScore(3.0, 64) for _ in range(3))
    wanted = [whole.add(value) for value in values]
    found = [first.add(value) for value in values[:100]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [second.add(value) for value in values[100:]]
    assert found == wanted
    assert second.state_dict() == whole.state_dict()


def test_a_spike_is_told_and_its_step_recorded_though_it_is_not_measured() -> None:
    t, notes = trainer(every=100, steps=60, optim={"name": "sgd", "lr": 1e-6}), Notes()
    poisoned(t, lambda step: 40.0 if step == 50 else 1.0)  # logits, so that loss and gradient grow
    (window,) = windows(1)
    for _ in range(52):
        t.step(window, notes)
    told = [(event["step"], event["event"], event["of"]) for event in notes.events]
    assert told == [(50, "spike", "loss"), (50, "spike", "grad_norm")]
    assert all(float(event["sigmas"]) >= 6 for event in notes.events)  # type: ignore[arg-type]
    assert sorted(notes.values) == [1, 50]
    assert notes.values[50]["loss_train"] == notes.events[0]["value"]
    assert (notes.values[50]["spike"], notes.values[50]["spike_grad"]) == (1 / 50, 1 / 50)
    assert {step for step, _ in notes.profiles} == set()
