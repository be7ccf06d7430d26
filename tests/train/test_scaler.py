"""The loss scale by itself, and what the loop does with it."""

import copy
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from normscale.config.precision import LossScaleConfig
from normscale.config.schema import RunConfig
from normscale.models.builder import build
from normscale.probes.activations import Activations
from normscale.probes.gradients import Gradients
from normscale.tracking.reader import read_run
from normscale.tracking.record import QUANTITIES
from normscale.train.engines.plain import PlainEngine
from normscale.train.loop import Trainer
from normscale.train.observe import subject_of
from normscale.train.recording import Step
from normscale.train.run import run
from normscale.train.scaler import LARGEST, Change, LossScale
from tests.probes.test_probes import MODEL, Notes, windows
from tests.train.test_run import config


def trainer(scale: Mapping[str, object], model: Mapping[str, object] = {}, **train: object) -> Trainer:
    precision = {"compute": "fp16", "loss_scale": scale} if scale else {}
    config = RunConfig(
        model=MODEL | dict(model),
        train={"steps": 20, "batch": 4, **train},
        precision=precision,
        probes={"every": 1},
    )
    engine = PlainEngine(build(config.model, 32, 0), config.precision, torch.device("cpu"))
    probes = [Activations(), Gradients()]
    for probe in probes:
        probe.attach(subject_of(engine))
    return Trainer(engine, config, probes)


def test_it_halves_at_once_and_doubles_after_so_many_steps_in_a_row() -> None:
    scale = LossScale(LossScaleConfig(initial=8.0, growth_steps=3, minimum=2.0))
    told = [True, True, False, True, True, True, False, False, False, True]
    changes = [scale.update(finite) for finite in told]
    halved, doubled = Change(8.0, 4.0, "overflow"), Change(4.0, 8.0, "growth")
    assert changes == [None, None, halved, None, None, doubled, halved, Change(4.0, 2.0, "overflow"), None, None]
    assert scale.value == 2.0


def test_what_is_not_finite_is_put_down_to_the_scale_as_long_as_it_can_be_halved() -> None:
    scale = LossScale(LossScaleConfig(initial=2.0))
    assert scale.absorbs()
    scale.update(False)
    assert (scale.value, scale.absorbs()) == (1.0, False)
    fixed = LossScale(LossScaleConfig(initial=8.0, dynamic=False))
    assert not fixed.absorbs()
    assert [fixed.update(False), fixed.value] == [None, 8.0]


def test_growth_ends() -> None:
    scale = LossScale(LossScaleConfig(initial=LARGEST / 2, growth_steps=1))
    assert [scale.update(True), scale.update(True)] == [Change(LARGEST / 2, LARGEST, "growth"), None]
    assert scale.value == LARGEST


def test_a_scale_goes_on_where_another_was() -> None:
    settings = LossScaleConfig(initial=8.0, growth_steps=3)
    one, other = LossScale(settings), LossScale(settings)
    for finite in (False, True, True):
        one.update(finite)
    other.load_state_dict(one.state_dict())
    assert other.update(True) == one.update(True) == Change(4.0, 8.0, "growth")


def test_training_goes_on_with_the_scale_it_had() -> None:
    scale = {"initial": 2.0**20, "growth_steps": 2}
    one, other = trainer(scale), trainer(scale)
    steps = windows(12)
    for window in steps[:10]:
        one.step(window, Notes())
    assert one.scale is not None
    assert one.scale.value < 2.0**20
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for window in steps[10:]:
        assert one.step(window, Notes()) == other.step(window, Notes())
    assert torch.equal(one.engine.flat.values, other.engine.flat.values)


def test_recomputed_blocks_round_as_they_did() -> None:
    one, other = trainer({"initial": 64.0}), trainer({"initial": 64.0}, model={"checkpointing": True})
    for window in windows(3):
        assert one.step(window, Notes()) == other.step(window, Notes())
    assert torch.equal(one.engine.flat.values, other.engine.flat.values)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_scale_shows_in_no_number_but_its_own(accumulate: int) -> None:
    optim = {"name": "sgd", "lr": 0.5, "clip": 0.5}
    scales = ({"initial": 16.0}, {"initial": 1024.0}, {})
    trainers = [trainer(scale, batch=4 * accumulate, accumulate=accumulate, optim=optim) for scale in scales]
    notes = [Notes() for _ in trainers]
    for window in windows(4, micro=accumulate):
        steps = [t.step(window, note) for t, note in zip(trainers, notes, strict=True)]
    fp32 = steps[2]
    for t, note, step, value in zip(trainers[:2], notes, steps, (16.0, 1024.0), strict=False):
        assert step.norm == pytest.approx(fp32.norm, rel=5e-3)  # 16 times larger if it were not taken out
        assert note.values[4]["loss_scale"] == value
        assert step.norm_clipped == pytest.approx(0.5, rel=1e-5)
        for name in ("grad_first", "grad_last", "grad_p50"):
            assert note.values[4][name] == pytest.approx(notes[2].values[4][name], rel=0.02)
        torch.testing.assert_close(t.engine.flat.values, trainers[2].engine.flat.values, rtol=0, atol=2e-3)
    assert "loss_scale" not in notes[2].values[4]
    assert (fp32.scale, fp32.overflow) == (None, False)
    assert QUANTITIES["loss_scale"].mlflow == "2-health/loss_scale"


def test_without_rounding_a_scale_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, scaled = trainer({}), trainer({})
    scaled.scale = LossScale(LossScaleConfig())
    for window in windows(5, micro=2):
        assert plain.step(window, Notes()).norm == scaled.step(window, Notes()).norm
    assert torch.equal(plain.engine.flat.values, scaled.engine.flat.values)


def test_small_gradients_are_lost_without_it() -> None:
    """The last bias of a deep chain of small gains: its gradient is under fp16's least number unless scaled."""
    norms = {}
    for initial in (1.0, 2.0**16):
        t = trainer({"initial": initial})
        inner = t.engine.inner
        with torch.no_grad():
            inner.token.mul_(1e-6)  # the head is tied: what flows back from it is as small
        t.step(windows(1)[0], Notes())
        branch = inner.sublayers()[0].branch
        norms[initial] = float(branch.o.weight.grad.norm())  # type: ignore[union-attr]
    assert norms[1.0] < 0.5 * norms[2.0**16]


def overflowing(steps: int) -> tuple[Trainer, Notes, list[Step], list[torch.Tensor]]:
    """A scale so large that the first steps overflow."""
    t, notes = trainer({"initial": 2.0**24}), Notes()
    results, weights = [], [t.engine.flat.values.clone()]
    for window in windows(steps):
        results.append(t.step(window, notes))
        weights.append(t.engine.flat.values.clone())
    return t, notes, results, weights


def test_an_overflow_halves_the_scale_skips_the_step_and_is_nobodys_fault() -> None:
    t, notes, results, weights = overflowing(16)
    skipped = [result.overflow for result in results]
    n = skipped.index(False)
    assert 1 < n < 14
    assert skipped == [True] * n + [False] * (16 - n)
    assert [result.applied for result in results] == [not s for s in skipped]
    assert all(torch.equal(weights[0], w) for w in weights[: n + 1])
    assert not torch.equal(weights[n], weights[n + 1])
    assert [result.scale for result in results] == [2.0 ** (24 - min(i, n)) for i in range(16)]
    alarms = [event for event in notes.events if event["event"] == "stalled"]
    assert [(alarm["step"], alarm["reasons"]) for alarm in alarms] == [(5, "loss scale overflow x5")]
    assert [event for event in notes.events if event not in alarms] == [
        {
            "step": i + 1,
            "event": "loss_scale",
            "before": 2.0 ** (24 - i),
            "after": 2.0 ** (23 - i),
            "reason": "overflow",
            "found_in": "gradient",
        }
        for i in range(n)
    ]
    assert t.first_bad is None
    assert notes.values[16]["skipped"] == n
    assert results[n].lr == results[0].lr  # the schedule counts applied steps


def test_what_an_overflow_spoilt_is_not_recorded_and_the_first_applied_step_is() -> None:
    _, notes, results, _ = overflowing(16)
    n = [result.overflow for result in results].index(False)
    for step in range(1, n + 1):
        values = notes.values[step]
        assert all(math.isfinite(value) for value in values.values())
        assert values["nonfinite"] == 0
        assert values["loss_train"] == results[step - 1].loss
        assert "grad_norm" not in values
    assert all(np.isfinite(profile).all() for profile in notes.profiles.values())
    assert {"grad_norm", "grad_first"} <= notes.values[n + 1].keys()


def test_steps_are_measured_until_one_is_applied() -> None:
    t = trainer({})
    t.config = t.config.model_copy(update={"probes": t.config.probes.model_copy(update={"every": 10})})
    assert [t.measures(step) for step in (1, 2, 3)] == [True, False, False]
    t.scale = LossScale(LossScaleConfig())
    assert [t.measures(step) for step in (1, 2, 3)] == [True, True, True]
    t.applied = 1
    assert [t.measures(step) for step in (1, 2, 3)] == [True, False, False]


def grown(t: Trainer, factor: float) -> None:
    """Makes the feed-forward of block 1 (site 3) give activations beyond fp16, or takes that back."""
    with torch.no_grad():
        t.engine.inner.sublayers()[3].branch.out.weight.mul_(factor)  # type: ignore[union-attr]


def test_activations_beyond_fp16_are_told_from_gradients_and_training_recovers() -> None:
    t, notes = trainer({"initial": 1024.0}, model={"scheme": "pre"}), Notes()
    results = []
    for step, window in enumerate(windows(5), start=1):
        grown(t, {2: 1e7, 4: 1e-7}.get(step, 1.0))
        results.append(t.step(window, notes))
    assert [result.applied for result in results] == [True, False, False, True, True]
    told = [(e["step"], e["before"], e["after"], e["found_in"], e["layer"]) for e in notes.events]
    assert told == [(2, 1024.0, 512.0, "forward", 3), (3, 512.0, 256.0, "forward", 3)]
    assert not math.isfinite(results[1].loss)
    assert "loss_train" not in notes.values[2]
    assert t.spikes.score == 0
    assert t.first_bad is None


def test_in_fp32_the_same_activations_are_harmless() -> None:
    t, notes = trainer({}, model={"scheme": "pre"}), Notes()
    grown(t, 1e7)
    assert t.step(windows(1)[0], notes).applied


def test_at_the_least_scale_the_fault_is_the_models() -> None:
    t, notes = trainer({"initial": 4.0, "minimum": 2.0}, model={"scheme": "pre"}), Notes()
    grown(t, 1e7)
    results = [t.step(window, notes) for window in windows(3)]
    assert [result.overflow for result in results] == [True, False, False]
    assert [event["event"] for event in notes.events] == ["loss_scale", "nonfinite", "nonfinite"]
    assert [(event["loss_scale"], event["layer"]) for event in notes.events[1:]] == [(2.0, 3), (2.0, 3)]
    assert [notes.values[step]["nonfinite"] for step in (1, 2, 3)] == [0, 1, 1]
    assert t.first_bad is not None
    assert t.first_bad[:2] == (2, 3)


@pytest.mark.parametrize(("policy", "outcome", "steps"), [("stop", "nan", 4), ("skip", "nan", 6)])
def test_a_run_that_overflows_for_good_stops_at_the_least_scale(
    tmp_path: Path, policy: str, outcome: str, steps: int
) -> None:
    precision = {"compute": "fp16", "loss_scale": {"initial": 8.0}}
    model = {"M": 2, "d": 16, "heads": 2, "context": 16, "scheme": "pre", "init": "normal", "init_std": 1e3}
    train = {"steps": 6, "batch": 4, "eval_batches": 1, "on_nonfinite": policy}
    result = run(config(tmp_path, model=model, train=train, precision=precision, probes={"every": 2}))
    assert (result.outcome, result.summary["steps"], result.summary["bad_step"]) == (outcome, steps, 4)
    record = read_run(result.run_dir)
    told = [(event["step"], event["event"]) for event in record.events]
    assert told[:4] == [(1, "loss_scale"), (2, "loss_scale"), (3, "loss_scale"), (4, "nonfinite")]


def test_a_run_in_fp16_is_near_the_run_in_fp32(tmp_path: Path) -> None:
    losses = []
    for precision in ({}, {"compute": "fp16"}, {"compute": "fp8_e4m3"}):
        train = {"steps": 20, "batch": 4, "eval_batches": 2, "schedule": {"warmup_steps": 4}, "optim": {"lr": 0.003}}
        result = run(config(tmp_path, train=train, precision=precision, probes={"every": 1}))
        assert result.outcome == "finished"
        losses.append(read_run(result.run_dir).series["loss_train"].values)
    fp32, fp16, fp8 = (np.array(series) for series in losses)
    assert fp32[-1] < fp32[0] - 0.3
    assert 0 < np.abs(fp16 - fp32).max() < 2e-3
    assert np.abs(fp16 - fp32).max() < np.abs(fp8 - fp32).max() < 0.05
