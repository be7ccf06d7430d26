"""The step: what it applies, what it refuses to apply, and what it tells."""

import math
from collections.abc import Callable

import pytest
import torch

from normscale.config.schema import RunConfig
from normscale.models.builder import build
from normscale.train.engine import Engine
from normscale.train.loop import IGNORE, Trainer, summed_loss
from tests.probes.test_probes import MODEL, Notes, windows


def trainer(**train: object) -> Trainer:
    config = RunConfig(model=MODEL, train={"steps": 20, "batch": 4, **train}, probes={"every": 1})
    return Trainer(Engine(build(config.model, 32, 0), config.precision, torch.device("cpu")), config, [])


def poisoned(trainer: Trainer, bad: Callable[[int], float]) -> None:
    """Multiplies the logits of step n by bad(n)."""
    inner = trainer.engine.inner
    trainer.engine.model = lambda tokens, rows: inner(tokens, rows) * bad(trainer.attempted)


def test_accumulated_micro_batches_equal_one_batch_of_the_same_samples() -> None:
    whole, parts = trainer(optim={"name": "sgd", "lr": 0.5}), trainer(accumulate=4, optim={"name": "sgd", "lr": 0.5})
    notes = Notes()
    for window in windows(3, micro=1, size=8):
        tokens, targets = window[0]
        whole.step(window, Notes())
        parts.step(list(zip(tokens.chunk(4), targets.chunk(4), strict=True)), notes)
    torch.testing.assert_close(whole.engine.flat.values, parts.engine.flat.values, rtol=1e-5, atol=1e-6)
    assert sorted(notes.values) == [1, 2, 3]  # the norm is measured once a step, not once a micro-batch
    assert notes.values[3]["grad_norm"] == pytest.approx(float(whole.engine.flat.grad_norm()), rel=1e-5)


def test_uneven_targets_weigh_by_token_and_not_by_micro_batch() -> None:
    (tokens, targets), *_ = windows(1, micro=1, size=8)[0]
    targets = targets.clone()
    targets[:4, 1:] = IGNORE  # 4 targets in the first half, 32 in the second
    whole, parts = trainer(), trainer()
    one = whole.step([(tokens, targets)], Notes())
    two = parts.step(list(zip(tokens.chunk(2), targets.chunk(2), strict=True)), Notes())
    assert one.loss == pytest.approx(two.loss, rel=1e-6)
    assert one.norm == pytest.approx(two.norm, rel=1e-5)
    logits = build(whole.config.model, 32, 0)(tokens)
    assert one.loss == pytest.approx(float(summed_loss(logits, targets).detach()) / 36, rel=1e-6)


def test_a_nan_loss_shows_at_its_step_and_is_not_applied() -> None:
    t, notes = trainer(), Notes()
    poisoned(t, lambda step: math.nan if step == 3 else 1.0)
    weights = []
    for window in windows(6):
        t.step(window, notes)
        weights.append(t.engine.flat.values.clone())
    assert math.isnan(notes.values[3]["loss_train"])
    assert [notes.values[n]["nonfinite"] for n in range(1, 7)] == [0, 0, 1, 0, 0, 0]
    assert [notes.values[n]["skipped"] for n in range(1, 7)] == [0, 0, 1, 1, 1, 1]
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])
    assert all(math.isfinite(notes.values[n]["loss_train"]) for n in (4, 5, 6))
    assert (t.attempted, t.applied) == (6, 5)
    assert [e["event"] for e in notes.events] == ["nonfinite"]


def test_the_learning_rate_counts_applied_steps() -> None:
    plain, skipping = (
        trainer(schedule={"warmup_steps": 10}),
        trainer(schedule={"warmup_steps": 10}, accumulate=4, batch=16),
    )
    poisoned(skipping, lambda step: math.nan if step == 4 else 1.0)
    rates = [plain.step(window, Notes()).lr for window in windows(8)]
    steps = [skipping.step(window, Notes()) for window in windows(9, micro=4)]
    assert [step.lr for step in steps if step.applied] == pytest.approx(rates)
    assert rates[-1] == pytest.approx(0.8e-3)


def test_an_infinite_gradient_is_named_before_clipping_and_nothing_moves() -> None:
    t, notes = trainer(optim={"clip": 1.0}), Notes()
    good, bad = windows(2)
    t.step(good, notes)
    before = t.engine.flat.values.clone()
    moments = {k: v.clone() for k, v in t.optimizer.state[t.optimizer.param_groups[0]["params"][0]].items()}
    out = t.engine.inner.blocks[1].sublayers["ffn"].branch.out  # type: ignore[index,union-attr]
    out.weight.register_hook(lambda g: torch.where(torch.arange(g.numel()).view_as(g) == 0, torch.inf, g))
    result = t.step(bad, notes)
    assert not result.applied
    event = notes.events[0]
    assert event["fault"] == "+Inf"  # not the NaN that clipping would have made of it
    assert event["layer"] == 3  # the feed-forward of block 1
    assert event["parameters"] == [
        {"name": "blocks.1.sublayers.ffn.branch.out.weight", "kind": "+Inf", "nan": 0, "pos_inf": 1, "neg_inf": 0}
    ]
    assert torch.equal(before, t.engine.flat.values)
    after = t.optimizer.state[t.optimizer.param_groups[0]["params"][0]]
    assert all(torch.equal(moments[k], after[k]) for k in moments)
    assert notes.values[2]["grad_norm"] == math.inf


def test_a_norm_that_overflows_is_told_from_a_bad_gradient() -> None:
    t, notes = trainer(), Notes()
    t.engine.inner.token.register_hook(lambda g: torch.full_like(g, 1e20))
    t.step(windows(1)[0], notes)
    assert str(notes.events[0]["fault"]).startswith("norm overflow")
    assert notes.events[0]["parameters_bad"] == 0


def test_clipping_keeps_the_direction_and_reports_both_norms() -> None:
    t, notes = trainer(optim={"name": "sgd", "lr": 1.0, "clip": 0.1}), Notes()
    before = t.engine.flat.values.clone()
    result = t.step(windows(1)[0], notes)
    assert result.norm > 0.2
    assert notes.values[1]["grad_norm_clipped"] == pytest.approx(0.1, rel=1e-4)
    assert float((before - t.engine.flat.values).norm()) == pytest.approx(0.1, rel=1e-4)


def test_evaluation_leaves_training_as_it_was() -> None:
    with_eval, without = trainer(), trainer()
    for t in (with_eval, without):
        t.engine.inner.dropout.p = 0.3
    torch.manual_seed(0)
    losses = []
    for window in windows(3):
        with_eval.evaluate(window)
        losses.append(with_eval.step(window, Notes()).loss)
    torch.manual_seed(0)
    assert losses == [without.step(window, Notes()).loss for window in windows(3)]
