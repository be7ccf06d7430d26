"""Steps that go wrong: what counts as wrong, which layer is named, and what the policy makes of it."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from normscale.train import loop
from normscale.train.loop import Trainer, summed_loss
from normscale.train.run import run
from tests.probes.test_probes import Notes, windows
from tests.train.test_loop import poisoned, trainer
from tests.train.test_run import config


def test_a_loss_that_is_not_finite_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    t, notes = trainer(), Notes()
    before = t.engine.flat.values.clone()
    monkeypatch.setattr(loop, "summed_loss", lambda logits, targets: summed_loss(logits, targets) + math.nan)
    result = t.step(windows(1)[0], notes)
    assert math.isfinite(result.norm)  # the gradient of a constant is nothing
    assert not result.applied
    assert torch.equal(t.engine.flat.values, before)
    event = notes.events[0]
    assert (event["fault"], event["layer"], event["parameter"], event["parameters_bad"]) == ("loss", -1, "", 0)


def test_the_first_bad_step_is_kept_and_each_is_told() -> None:
    t, notes = trainer(), Notes()
    poisoned(t, lambda step: math.nan if step in (2, 4) else 1.0)
    for window in windows(5):
        t.step(window, notes)
    assert t.first_bad is not None
    assert t.first_bad[0] == 2
    assert [event["step"] for event in notes.events] == [2, 4]


def test_every_faulty_parameter_is_listed_up_to_twenty() -> None:
    t, notes = trainer(), Notes()
    poisoned(t, lambda step: math.nan)
    t.step(windows(1)[0], notes)
    names = [name for name, _ in t.engine.inner.named_parameters()]
    assert notes.events[0]["parameters_bad"] == len(names) > 20
    assert [entry["name"] for entry in notes.events[0]["parameters"]] == names[:20]  # type: ignore[attr-defined]


def test_several_faults_are_told_apart_and_the_last_in_model_order_is_where_backward_went_wrong() -> None:
    t, notes = trainer(), Notes()
    inner = t.engine.inner
    inner.token.register_hook(lambda g: g.index_fill(0, torch.tensor([3]), math.nan))  # an end: no layer
    for block, bad in ((0, -math.inf), (1, math.inf)):
        bias = inner.blocks[block].sublayers["ffn"].branch.up.bias  # type: ignore[index,union-attr]
        bias.register_hook(lambda g, bad=bad: g.index_fill(0, torch.tensor([0, 1]), bad))
    t.step(windows(1)[0], notes)
    event = notes.events[0]
    shared = {"nan": 0, "pos_inf": 0, "neg_inf": 0}
    assert event["parameters"] == [
        shared | {"name": "token", "kind": "NaN", "nan": 16},
        shared | {"name": "blocks.0.sublayers.ffn.branch.up.bias", "kind": "-Inf", "neg_inf": 2},
        shared | {"name": "blocks.1.sublayers.ffn.branch.up.bias", "kind": "+Inf", "pos_inf": 2},
    ]
    assert (event["parameters_bad"], event["layer"]) == (3, 3)
    assert event["parameter"] == "blocks.1.sublayers.ffn.branch.up.bias"
    assert t.first_bad == (1, 3, "blocks.1.sublayers.ffn.branch.up.bias")


def spoil(x: Tensor) -> Tensor:
    """`x` with +Inf in one place."""
    return torch.where(torch.arange(x.numel()).view_as(x) == 5, torch.inf, x)


@contextmanager
def forward_fault(t: Trainer, site: int, step: int) -> Iterator[None]:
    """Puts +Inf into the branch output of one site in one step."""

    def hook(module: object, args: object, out: Tensor) -> Tensor | None:
        return spoil(out) if t.attempted == step else None

    handle = t.engine.inner.sublayers()[site].branch.register_forward_hook(hook)
    yield
    handle.remove()


@contextmanager
def backward_fault(t: Trainer, site: int, step: int) -> Iterator[None]:
    """Puts +Inf into the gradient of the stream after one site in one step."""

    def hook(module: object, args: object, streams: tuple[Tensor, ...]) -> None:
        if t.attempted == step and streams[0].requires_grad:
            streams[0].register_hook(spoil)

    handle = t.engine.inner.sublayers()[site].register_forward_hook(hook)
    yield
    handle.remove()


@pytest.mark.parametrize("scheme", ["pre", "deepnorm"])
@pytest.mark.parametrize("site", [0, 3, 4])
@pytest.mark.parametrize("fault", [forward_fault, backward_fault])
def test_a_fault_inside_the_graph_is_put_down_to_its_layer(fault: Callable, site: int, scheme: str) -> None:  # type: ignore[type-arg]
    t, notes = trainer(model={"scheme": scheme}), Notes()
    with fault(t, site, step=2):
        results = [t.step(window, notes) for window in windows(3)]
    assert [result.applied for result in results] == [True, False, True]
    assert math.isfinite(results[1].loss) is (fault is backward_fault)
    assert [(event["step"], event["layer"]) for event in notes.events] == [(2, site)]
    assert t.first_bad is not None
    assert t.first_bad[:2] == (2, site)
    if fault is backward_fault:
        assert t.engine.inner.site_of(t.first_bad[2]) == site


def test_the_right_micro_batch_is_looked_at() -> None:
    t, notes = trainer(accumulate=2, batch=8), Notes()
    window = windows(1, micro=2)[0]
    marked = window[1][0]

    def hook(module: object, args: tuple[Tensor, ...]) -> None:
        t.second = torch.equal(args[0], marked)  # type: ignore[attr-defined]

    t.engine.inner.register_forward_pre_hook(hook)
    branch = t.engine.inner.sublayers()[4].branch
    branch.register_forward_hook(lambda m, a, out: spoil(out) if t.second else None)  # type: ignore[attr-defined]
    t.step(window, notes)
    assert notes.events[0]["layer"] == 4


@pytest.mark.parametrize(("policy", "outcome", "code", "steps"), [("stop", "nan", 3, 3), ("skip", "finished", 0, 6)])
def test_a_gradient_alone_stops_a_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, outcome: str, code: int, steps: int
) -> None:
    original = Trainer.step

    def step(self, window, recorder):  # type: ignore[no-untyped-def]
        with backward_fault(self, site=2, step=3):
            result = original(self, window, recorder)
        assert math.isfinite(result.loss)
        return result

    monkeypatch.setattr(Trainer, "step", step)
    train = {"steps": 6, "batch": 4, "eval_batches": 2, "on_nonfinite": policy}
    result = run(config(tmp_path, train=train, probes={"every": 2}))
    summary = result.summary
    assert (result.outcome, result.exit_code, summary["steps"]) == (outcome, code, steps)
    assert (summary["bad_step"], summary["bad_layer"], summary["skipped"]) == (3, 2, 1)
    assert summary["bad_parameter"].startswith("blocks.1.sublayers.self.")
    assert summary["applied"] == steps - 1
