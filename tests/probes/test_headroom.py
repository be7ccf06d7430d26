"""Headroom and its forecast: by themselves, and in a model that is made to overflow."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from normscale.probes.activations import Activations
from normscale.probes.headroom import LAST, Headroom, steps_left
from normscale.schemes import Scheme, registry
from tests.probes.test_depth import trainer_of
from tests.probes.test_probes import Notes, windows

FP16 = 65504.0


def test_headroom_is_in_bits_and_the_least_of_all_sites_is_named() -> None:
    room = Headroom(FP16, 3)
    found = room.read(1, np.array([FP16 / 4, FP16 / 2, 1.0]))
    assert found.profiles["headroom_bits"].tolist() == pytest.approx([2.0, 1.0, math.log2(FP16)])
    assert found.scalars == {"headroom": pytest.approx(1.0), "headroom_layer": 1.0}


def test_what_is_zero_has_no_headroom_and_what_is_infinite_has_none_left() -> None:
    room = Headroom(FP16, 3)
    bits = room.read(1, np.array([0.0, np.inf, 1.0])).profiles["headroom_bits"]
    assert math.isnan(bits[0])
    assert bits[1] == -math.inf
    assert room.read(2, np.array([0.0, np.inf, 1.0])).scalars == {}
    assert room.read(3, np.zeros(3)).scalars == {}


def test_growth_by_a_factor_is_foreseen_exactly_and_from_the_newest_steps_alone() -> None:
    room, left = Headroom(FP16, 2), {}
    for step in range(10, 200, 10):
        size = 3.0 if step < 50 else 2.0 ** ((step - 50) / 20)  # half a bit in ten steps
        left[step] = room.read(step, np.array([1.0, size])).scalars.get("overflow_in")
    assert left[30] is None
    assert left[40] is None  # it does not grow yet
    for step in (150, 160, 190):
        assert left[step] == pytest.approx(50 + 20 * math.log2(FP16) - step, rel=1e-9)
    assert LAST == 8


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_trend(seed: int) -> None:
    steps = np.arange(8.0)
    noise = np.random.default_rng(seed).normal(size=8)
    bits = 5 + noise - np.polyval(np.polyfit(steps, noise, 1), steps)  # nothing of a slope in it
    assert steps_left(steps, bits - 0.01 * steps) is None
    assert steps_left(steps, bits - 5.0 * steps) == pytest.approx(max(0.0, (5 - 35) / 5))
    assert steps_left(steps, 40 + bits - 5.0 * steps) == pytest.approx(2.0, abs=1e-6)


def test_what_is_too_little_or_too_far_is_no_forecast() -> None:
    steps = np.arange(8.0)
    assert steps_left(steps[:3], 3 - steps[:3]) is None
    assert steps_left(steps, np.where(steps == 7, np.nan, 3 - steps)) is None
    assert steps_left(steps, np.where(steps < 3, np.nan, 10 - steps)) == pytest.approx(3.0)
    assert steps_left(steps, 100 - 1e-5 * steps) is None
    assert steps_left(steps, 1 + steps) is None


def test_a_forecast_goes_on_after_a_restart() -> None:
    one, other = Headroom(FP16, 2), Headroom(FP16, 2)
    for step in range(1, 9):
        one.read(step, np.array([1.0, 2.0**step]))
    other.load_state_dict(one.state_dict())
    sizes = np.array([1.0, 2.0**9])
    assert other.read(9, sizes).scalars == one.read(9, sizes).scalars
    assert "overflow_in" in one.read(10, 2 * sizes).scalars


@pytest.mark.parametrize("factor", [1.15, 1.4])
def test_an_overflow_in_fp16_is_foreseen(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of a network without norms grows by a factor a step, and its products overflow in the end."""
    monkeypatch.setitem(registry.SCHEMES.classes, "bare", Scheme)
    model: dict[str, Any] = {"scheme": "bare", "tied": False, "bias": False}
    scale = {"dynamic": False, "initial": 1.0}
    trainer = trainer_of([Activations()], model, precision={"compute": "fp16", "loss_scale": scale})
    inner = trainer.engine.inner
    with torch.no_grad():
        for sublayer in inner.sublayers()[::2]:
            sublayer.branch.qkv.weight[:32].zero_()  # q and k: scores would overflow as the square of the stream
    notes, failed = Notes(), 0
    (window,) = windows(1, size=2)
    for step in range(1, 100):
        weights = trainer.engine.flat.values.clone()
        if not trainer.step(window, notes).applied:
            failed = step
            break
        trainer.engine.flat.values.copy_(weights)  # what grows is the embedding alone
        with torch.no_grad():
            inner.token.mul_(factor)
    assert 20 < failed < 100
    assert notes.values[failed - 1]["headroom"] > 0
    foreseen = {step: values["overflow_in"] for step, values in notes.values.items() if "overflow_in" in values}
    assert set(range(10, failed - 4)) <= set(foreseen)
    for step in range(10, failed - 4):
        assert foreseen[step] == pytest.approx(failed - step, rel=0.3, abs=1), step


@pytest.mark.parametrize(("scheme", "limit"), [("pre", torch.float32), ("reordered", torch.float16)])
def test_a_stream_in_fp32_has_the_room_of_fp32_where_only_norms_read_it(scheme: str, limit: torch.dtype) -> None:
    probe = Activations()
    trainer_of([probe], {"scheme": scheme, "M": 1}, precision={"compute": "fp16"})
    absmax = np.array([[1e-6, 1e-6], [1e-36, 1e6]])  # the stream of the second site is past fp16's largest number
    values = {"sums": np.ones(12), "positions": np.array([0.0, 4.0]), "maxima": absmax.ravel()}
    values["step"] = np.ones(1)
    probe.begin(1)
    bits = probe.read(values).profiles["headroom_bits"]
    assert bits[0] == pytest.approx(math.log2(FP16 / 1e-6))  # the branch's, which products make
    assert bits[1] == pytest.approx(math.log2(torch.finfo(limit).max / 1e6))
