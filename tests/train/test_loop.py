"""The step: what it applies, what it refuses to apply, and what it tells."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normscale.config.schema import RunConfig, TrainConfig
from normscale.data.task import MicroBatch
from normscale.models.builder import build
from normscale.probes.activations import Activations
from normscale.probes.gradients import Gradients
from normscale.probes.probe import Probe
from normscale.train import loop, recording
from normscale.train.engines.ddp import DDPEngine
from normscale.train.engines.plain import PlainEngine
from normscale.train.loop import IGNORE, Trainer, differentiated, summed_loss
from normscale.train.observe import subject_of
from tests.probes.test_probes import MODEL, Notes, windows


def trainer(model: Mapping[str, object] = {}, every: int = 1, probes: Sequence[Probe] = (), **train: object) -> Trainer:
    config = RunConfig(model=MODEL | dict(model), train={"steps": 20, "batch": 4, **train}, probes={"every": every})
    engine = PlainEngine(build(config.model, 32, 0), config.precision, torch.device("cpu"))
    for probe in probes:
        probe.attach(subject_of(engine))
    return Trainer(engine, config, probes)


def poisoned(trainer: Trainer, bad: Callable[[int], float]) -> None:
    """Multiplies the logits of step n by bad(n)."""
    inner = trainer.engine.inner
    trainer.engine.model = lambda tokens, rows: inner(tokens, rows) * bad(trainer.attempted)


def test_accumulated_micro_batches_equal_one_batch_of_the_same_samples() -> None:
    whole, parts = trainer(optim={"name": "sgd", "lr": 0.5}), trainer(accumulate=4, optim={"name": "sgd", "lr": 0.5})
    notes = Notes()
    for window in windows(3, micro=1, size=8):
        tokens, targets, *_ = window[0]
        whole.step(window, Notes())
        parts.step(list(map(MicroBatch, tokens.chunk(4), targets.chunk(4))), notes)
    torch.testing.assert_close(whole.engine.flat.values, parts.engine.flat.values, rtol=1e-5, atol=1e-6)
    assert sorted(notes.values) == [1, 2, 3]  # the norm is measured once a step, not once a micro-batch
    assert notes.values[3]["grad_norm"] == pytest.approx(float(whole.engine.flat.grad_norm()), rel=1e-5)


def test_an_evaluation_takes_no_more_sequences_at_once_than_a_micro_batch() -> None:
    whole, parts = trainer(), trainer(accumulate=2)
    batches = [batch for window in windows(3, micro=1, size=4) for batch in window]
    seen = []
    parts.engine.inner.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    assert parts.evaluate(batches) == pytest.approx(whole.evaluate(batches), rel=1e-6)
    assert seen == [2] * 6


def test_uneven_targets_weigh_by_token_and_not_by_micro_batch() -> None:
    (tokens, targets, *_), *_ = windows(1, micro=1, size=8)[0]
    targets = targets.clone()
    targets[:4, 1:] = IGNORE  # 4 targets in the first half, 32 in the second
    whole, parts = trainer(), trainer()
    one = whole.step([MicroBatch(tokens, targets)], Notes())
    two = parts.step(list(map(MicroBatch, tokens.chunk(2), targets.chunk(2))), Notes())
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


def test_the_loss_is_summed_in_fp32_and_leaves_out_what_is_ignored() -> None:
    logits = (8 * torch.randn(2, 8, 32)).bfloat16()
    targets = torch.randint(0, 32, (2, 8))
    targets[0, :3] = IGNORE
    loss = summed_loss(logits, targets)
    kept = targets != IGNORE
    log_shares = logits.double().log_softmax(-1)[kept]
    assert loss.dtype is torch.float32
    assert float(loss) == pytest.approx(-float(log_shares.gather(1, targets[kept].unsqueeze(1)).sum()), rel=1e-5)


def logits_and_targets() -> tuple[Tensor, Tensor]:
    """Some logits that have a gradient, with targets of which three are ignored."""
    logits, targets = (8 * torch.randn(2, 8, 32)).requires_grad_(), torch.randint(0, 32, (2, 8))
    targets[0, :3] = IGNORE
    return logits, targets


def test_the_z_loss_is_of_the_targets_that_count_and_differentiated_alone() -> None:
    logits, targets = logits_and_targets()
    plain = summed_loss(logits, targets)
    z = torch.stack([row.double().exp().sum() for row in logits.detach().flatten(0, 1)])
    want = (z.log() ** 2)[(targets != IGNORE).flatten()].sum()
    assert differentiated(plain, logits, targets, TrainConfig()) is plain
    added = differentiated(plain, logits, targets, TrainConfig(z_loss=0.25)) - plain
    assert float(added.detach()) == pytest.approx(0.25 * float(want), rel=1e-4)

    without, heavy = trainer(), trainer(z_loss=10.0)
    first = [t.step(windows(1)[0], Notes()) for t in (without, heavy)]
    assert first[0].loss == first[1].loss  # what is recorded is the cross-entropy
    assert first[1].norm > 2 * first[0].norm
    batch = windows(1)[0][0]
    assert float(heavy._loss_by_itself(batch)) > 2 * float(without._loss_by_itself(batch))  # what a replay looks at
    assert heavy.evaluate([batch]) == pytest.approx(float(with_plain(heavy, batch)), rel=1e-6)


def smoothed_by_torch(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    flat = logits_BTV.flatten(0, 1), targets_BT.flatten()
    return F.cross_entropy(*flat, ignore_index=IGNORE, reduction="sum", label_smoothing=0.1)


def test_label_smoothing_is_pytorchs() -> None:
    logits, targets = logits_and_targets()
    smooth = differentiated(summed_loss(logits, targets), logits, targets, TrainConfig(label_smoothing=0.1))
    want = smoothed_by_torch(logits, targets)
    assert float(smooth.detach()) == pytest.approx(float(want.detach()), rel=1e-6)
    got, wanted = (torch.autograd.grad(loss, logits)[0] for loss in (smooth, want))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert not got[0, :3].any()
    both = differentiated(summed_loss(logits, targets), logits, targets, TrainConfig(label_smoothing=0.1, z_loss=0.25))
    log_z = logits.detach().double().logsumexp(-1)[targets != IGNORE]
    assert float((both - want).detach()) == pytest.approx(0.25 * float(log_z.square().sum()), rel=1e-4)


def test_an_engine_differentiates_the_smoothed_loss_and_records_the_plain_one() -> None:
    """In two micro-batches with ignored targets."""
    t, window = trainer(accumulate=2, label_smoothing=0.1), []
    for batch in windows(1, micro=2)[0]:
        window.append(batch._replace(targets_BT=batch.targets_BT.index_fill(1, torch.arange(3), IGNORE)))
    model, count = t.engine.inner, sum(batch.n_targets for batch in window)
    losses = [smoothed_by_torch(model(batch.tokens_BT), batch.targets_BT) / count for batch in window]
    wanted = torch.autograd.grad(sum(losses), list(model.parameters()))
    plain = sum(float(with_plain(t, batch)) * batch.n_targets for batch in window) / count
    replayed = sum(float(t._loss_by_itself(batch).detach()) for batch in window) / count
    assert replayed == pytest.approx(float(sum(losses).detach()), rel=1e-6)

    got: list[Tensor] = []
    t._apply = lambda lr, factor: got.extend(p.grad.clone() for p in model.parameters())  # type: ignore[method-assign]
    step = t.step(window, Notes())
    assert step.loss == pytest.approx(plain, rel=1e-6)
    assert abs(replayed - plain) > 1e-3
    for gradient, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-6)


def with_plain(t: Trainer, batch: MicroBatch) -> Tensor:
    with torch.no_grad():
        return summed_loss(t.engine.inner(batch.tokens_BT), batch.targets_BT) / batch.n_targets


def test_evaluation_is_a_mean_over_the_targets_that_count() -> None:
    t, batches = trainer(), []
    for ((tokens, targets, *_),), ignored in zip(windows(3), (0, 3, 7), strict=True):
        batches.append(MicroBatch(tokens, targets.index_fill(1, torch.arange(ignored), IGNORE)))
    with torch.no_grad():
        losses = [summed_loss(t.engine.inner(batch.tokens_BT), batch.targets_BT) for batch in batches]
    assert t.evaluate(batches) == pytest.approx(float(sum(losses)) / (4 * (8 + 5 + 1)), rel=1e-6)


class Applied(Notes):
    """Keeps the count of applied steps that each record is filed under, too."""

    def __init__(self) -> None:
        super().__init__()
        self.applied: dict[int, int] = {}

    def metrics(self, step: int, applied: int, values: Mapping[str, float]) -> None:
        super().metrics(step, applied, values)
        self.applied[step] = applied


def test_records_say_how_many_steps_were_applied_by_then() -> None:
    t, notes = trainer(), Applied()
    poisoned(t, lambda step: math.nan if step in (2, 3) else 1.0)
    for window in windows(5):
        t.step(window, notes)
    assert notes.applied == {1: 1, 2: 1, 3: 1, 4: 2, 5: 3}
    assert {step: values["applied"] for step, values in notes.values.items()} == notes.applied


def test_the_spike_score_is_that_of_the_losses() -> None:
    t, notes = trainer(every=100), Notes()
    poisoned(t, lambda step: math.nan if step == 4 else 1.0)
    losses = [t.step(window, notes).loss for window in windows(5)]
    assert list(t.spikes.past) == [loss for loss in losses if math.isfinite(loss)]
    assert len(set(losses)) == 5
    assert notes.values[4]["spike"] == 1 / 4


def test_unmeasured_steps_fill_no_rows_and_leave_no_record() -> None:
    probes = (Activations(), Gradients())
    t, notes = trainer(every=3, probes=probes, steps=7), Notes()
    filled = []
    for window in windows(7):
        assert t.buffers is not None
        t.buffers.rows.zero_()
        t.step(window, notes)
        filled.append(bool((t.buffers.rows[:, 0] > 0).all()))
        assert filled[-1] or not t.buffers.rows.any()
    assert filled == [True, False, True, False, False, True, True]  # the first, every third, the last
    assert sorted(notes.values) == [1, 3, 6, 7]
    assert {step for step, _ in notes.profiles} == {1, 3, 6, 7}


def test_tokens_a_second_are_those_of_training_since_the_last_record(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    for module in (loop, recording):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    t, notes = trainer(every=2), Notes()

    def slow(seconds: float) -> Callable[..., None]:
        def hook(*args: object) -> None:
            now[0] += seconds

        return hook

    hook = t.engine.inner.register_forward_pre_hook(slow(0.5))
    for step, window in enumerate(windows(5), start=1):
        if step == 4:
            hook.remove()
            hook = t.engine.inner.register_forward_pre_hook(slow(100.0))
            t.evaluate(window)
            hook.remove()
            hook = t.engine.inner.register_forward_pre_hook(slow(0.25))
        t.step(window, notes)
    # 4 x 8 targets a step: one in 0.5 s; one in 0.5 s; then one in 0.5 s and one in 0.25 s, with an evaluation between.
    assert {n: values["tokens_s"] for n, values in notes.values.items()} == pytest.approx({1: 64, 2: 64, 4: 64 / 0.75})


def test_only_the_last_micro_batch_is_reduced_over_ranks() -> None:
    quiet = object()
    engine = DDPEngine.__new__(DDPEngine)
    engine.model = SimpleNamespace(no_sync=lambda: quiet)
    assert engine.micro_batch(last=False) is quiet
    assert engine.micro_batch(last=True) is not quiet

    t, asked = trainer(accumulate=3, batch=12), []
    real = t.engine.micro_batch
    t.engine.micro_batch = lambda last: asked.append(last) or real(last)  # type: ignore[method-assign,func-returns-value]
    t.step(windows(1, micro=3)[0], Notes())
    assert asked == [False, False, True]
