"""The hooks a scheme has in a run's life: `calibrate` before training, `after_step` on the weights."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from normscale.data.batches import Batches
from normscale.data.task import load_task
from normscale.models.builder import build
from normscale.models.init import weights
from normscale.schemes import Own, Scheme, Streams, Weight, registry
from normscale.train.run import run
from tests.probes.test_probes import Notes, windows
from tests.train.test_loop import poisoned, trainer
from tests.train.test_run import config

SMALL = {"M": 2, "d": 16, "heads": 2, "context": 16, "scheme": "guest"}


class Guest(Scheme):
    """x' = x + F(x), with every row of every matrix of the branches kept at length 1."""

    log: ClassVar[list[str]] = []
    profiled: ClassVar[list[Tensor]] = []  # the branches, as `calibrate` sees them
    given: ClassVar[list[Sequence[Weight]]] = []
    profiling = False

    def calibrate(self, forward: Callable[[], object]) -> None:
        self.log.append("calibrate")
        assert not torch.is_grad_enabled()
        self.profiling = True
        forward()
        self.profiling = False

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        if self.profiling:
            self.profiled.append(out)
        return super().write(streams, out, own)

    def after_step(self, weights: Sequence[Weight]) -> None:
        self.log.append("after_step")
        self.given.append(weights)
        assert not torch.is_grad_enabled()
        for weight in weights:
            if weight.site is not None and not weight.role.bias:
                weight.values.div_(weight.values.norm(dim=-1, keepdim=True))


@pytest.fixture(autouse=True)
def guest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.SCHEMES.classes, "guest", Guest)
    for kept in (Guest.log, Guest.profiled, Guest.given):
        kept.clear()


def lengths(model: torch.nn.Module) -> Tensor:
    """The lengths of all rows of all matrices inside the branches."""
    return torch.cat(
        [p.detach().norm(dim=-1) for name, p in model.named_parameters() if ".branch." in name and p.dim() == 2]
    )


def test_weights_are_projected_before_the_first_step_and_after_each_applied_one() -> None:
    t = trainer(model={"scheme": "guest"}, optim={"lr": 0.1})
    ones = torch.ones_like(lengths(t.engine.inner))
    torch.testing.assert_close(lengths(t.engine.inner), ones)
    poisoned(t, lambda step: math.nan if step == 2 else 1.0)
    for window, calls in zip(windows(3), (2, 2, 3), strict=True):
        before = t.engine.flat.values.clone()
        applied = t.step(window, Notes()).applied
        assert torch.equal(before, t.engine.flat.values) is not applied
        torch.testing.assert_close(lengths(t.engine.inner), ones)
        assert Guest.log == ["after_step"] * calls
    assert float((t.engine.inner.token.detach().norm(dim=-1) - 1).abs().min()) > 1e-4  # no branch's, so left alone


def test_all_weights_are_given_by_role_and_as_they_stand_in_the_buffer() -> None:
    t = trainer(model={"scheme": "guest", "tied": False, "positions": "learned"})
    (given,) = Guest.given
    fresh = {(w.name, w.rows.start): w for w in weights(build(t.config.model, 32, 0))}
    assert {(w.name, w.rows.start): (w.site, w.role) for w in given} == {k: (w.site, w.role) for k, w in fresh.items()}
    assert {w.role.part for w in given} == {"token", "position", "logits", "q", "k", "v", "o", "in", "out"}
    for weight in given:
        weight.values.fill_(7.0)
    held = [t.engine.flat.values[slice(*t.engine.flat.spans[name])] for name in {w.name for w in given}]
    assert all(bool((values == 7.0).all()) for values in held)


def test_a_run_calibrates_once_on_its_first_batch_before_anything_else(tmp_path: Path) -> None:
    train = {"steps": 2, "batch": 4, "accumulate": 2, "eval_batches": 1}
    settings = config(tmp_path, model=SMALL, train=train, probes={"every": 1}, seed=3)
    assert run(settings).outcome == "finished"
    assert Guest.log == ["calibrate", *["after_step"] * 3]
    # On the fresh model, and on the whole of the first batch whatever the ranks and the accumulation.
    task = load_task(settings)
    first = Batches(task.train, batch=4, seed=3).window(0)[0]
    wanted: list[Tensor] = []
    fresh = build(settings.model, task.vocab, 3)
    for sublayer in fresh.sublayers():
        sublayer.branch.register_forward_hook(lambda m, a, out: wanted.append(out.detach()))
    fresh(first.tokens_BT)
    assert len(wanted) == 4
    for seen, want in zip(Guest.profiled, wanted, strict=True):
        torch.testing.assert_close(seen, want)


def test_a_run_keeps_what_the_calibration_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {}
    for factor in (1.0, 0.0):

        class Silenced(Scheme):
            def __init__(self, options: object = None) -> None:
                super().__init__(options)
                self.factor = 1.0

            def calibrate(self, forward: Callable[[], object], factor: float = factor) -> None:
                self.factor = factor

            def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
                return (streams[0] + self.factor * out,)

        monkeypatch.setitem(registry.SCHEMES.classes, "guest", Silenced)
        train = {"steps": 1, "batch": 4, "eval_batches": 1}
        values[factor] = run(config(tmp_path / str(factor), model=SMALL, train=train, probes={"every": 1})).summary
    assert values[0.0]["grad_min_end"] == 0.0  # no branch is heard, so none learns
    assert values[1.0]["grad_min_end"] > 0.0
