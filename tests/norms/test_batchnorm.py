"""Batch norm: its statistics, what it remembers, and what leaves no trace in it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.norms import seen_before
from normscale.train.run import run
from tests.norms.made import made
from tests.train.test_resume import check_same, config, end_state, interrupted, resumed

SIZE = {"M": 2, "d": 16, "heads": 2, "context": 8, "scheme": "pre", "norm": "batchnorm"}
TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))


def remembered(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if "running" in name}


def test_it_is_batch_norm_of_the_tokens_and_remembers_as_torch_does() -> None:
    norm, mean, var = made("batchnorm", momentum=0.3), torch.zeros(8), torch.ones(8)
    for _ in range(3):
        x = 2.0 + 3.0 * torch.randn(4, 5, 8)
        want = F.batch_norm(x.flatten(0, 1), mean, var, training=True, momentum=0.3).view_as(x)
        torch.testing.assert_close(norm(x), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.running_mean, mean)
    torch.testing.assert_close(norm.running_var, var)
    norm.eval()
    torch.testing.assert_close(norm(x), ((x - mean) / (var + 1e-5).sqrt()))
    torch.testing.assert_close(norm.running_mean, mean)  # of evaluation nothing stays


def test_in_training_a_token_sees_later_ones_and_in_evaluation_it_does_not() -> None:
    model = build(ModelConfig(**SIZE), 32, 0)
    changed = TOKENS.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 32
    for training in (True, False):
        model.train(training)
        same = torch.allclose(model(TOKENS)[:, :-1], model(changed)[:, :-1], atol=1e-6)
        assert same is not training


@pytest.mark.parametrize("compiled", [False, True])
def test_a_pass_that_is_run_again_is_not_counted_twice(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: real(f, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    plain = build(ModelConfig(**SIZE), 32, 0)
    again = build(ModelConfig(**SIZE, checkpointing=True, compile=compiled), 32, 0)
    for model in (plain, again):
        for _ in range(2):
            model(TOKENS).square().mean().backward()
    for name, value in remembered(plain).items():
        torch.testing.assert_close(again.get_buffer(name), value)
        assert not torch.equal(value, torch.zeros_like(value))
    for a, b in zip(plain.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    assert all(float(norm.fresh) == 1.0 for norm in again.modules() if hasattr(norm, "fresh"))


def test_what_was_seen_before_changes_nothing_and_gives_the_same() -> None:
    norm, x = made("batchnorm"), torch.randn(6, 8)
    y, before = norm(x), remembered(norm)
    with seen_before(norm):
        assert torch.equal(norm(x), y)
    for name, value in before.items():
        assert torch.equal(norm.get_buffer(name), value)
    norm(x)
    assert not torch.equal(norm.running_mean, before["running_mean"])


def test_an_interrupted_run_goes_on_with_what_it_had_remembered(tmp_path: Path) -> None:
    model = {"scheme": "pre", "norms": {"attention": "batchnorm", "ffn": "dyt"}}  # of which none has a kernel
    whole, broken = (config(tmp_path / name, model=model) for name in ("whole", "broken"))
    want = run(whole)
    interrupted(broken, at=5)
    result, step = resumed(broken)
    assert step == 4
    check_same(want.run_dir, result.run_dir)
    tensors, _ = end_state(result.run_dir)
    running = {name: value for name, value in tensors.items() if name.endswith("norm.running_mean")}
    assert len(running) == 2
    assert all(bool(value.any()) for value in running.values())
