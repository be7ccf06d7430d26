"""Admin: what the profiling pass sets, the formula, and that a run keeps it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.schemes import Depth, Role
from normscale.schemes.admin import Admin
from normscale.train.run import run
from tests.schemes.written import FORMS, TOKENS, beside, branch, compare, ln, made
from tests.train.test_resume import config, end_state, interrupted, resumed

MODEL = {"M": 2, "d": 16, "heads": 2, "context": 16, "scheme": "admin"}


def omegas(model: Any) -> torch.Tensor:
    """One row a site: the omega of every channel."""
    return torch.stack([sublayer.own.alpha.detach() for sublayer in model.sublayers()])


def calibrated(model: Any, **inputs: torch.Tensor) -> Any:
    with torch.no_grad():
        model.scheme.calibrate(lambda: model(TOKENS, **inputs))
    return model


@pytest.mark.parametrize("form", FORMS)
def test_the_profile_is_the_standard_deviation_of_the_sum_before_and_the_stack_its_formula(form: str) -> None:
    """The ratios are taken as Transformer-Clinic takes them, in NumPy."""
    model, ratios = calibrated(made("admin", *FORMS[form]), **beside(form)), list[float]()

    def stack(layers: list[Any], ends: Any, x: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        ratio = 1.0
        for layer in layers:
            out = branch(layer, x, memory)
            ratios.append(ratio)
            input_var, output_var = (np.var(t.detach().numpy().reshape(-1)) for t in (ratio * x, out))
            x = ln(ratio * x + out, layer.own.norm)
            ratio = np.sqrt(input_var + output_var)
        return x

    compare(model, stack)
    torch.testing.assert_close(omegas(model), torch.tensor(ratios).unsqueeze(1).expand(-1, 16).double())


def test_until_it_is_calibrated_it_is_post_norm() -> None:
    post, admin = (build(ModelConfig(M=3, d=16, heads=2, context=8, scheme=name), 32, 0) for name in ("post", "admin"))
    assert torch.equal(post(TOKENS), admin(TOKENS))
    calibrated(admin)
    assert (post(TOKENS) - admin(TOKENS)).abs().max() > 0.1


def test_omega_learns_channel_by_channel() -> None:
    model = calibrated(made("admin", 0, 2))
    model(TOKENS).square().mean().backward()
    assert all(sublayer.own.alpha.grad.abs().min() > 0 for sublayer in model.sublayers())


@pytest.mark.parametrize("N", [1, 6, 18, 100, 1000])
def test_gains_are_1_at_every_depth(N: int) -> None:
    scheme = Admin()
    for depth in (Depth(N, 0), Depth(0, N), Depth(N, 3)):
        for part in ("q", "v", "o"):
            assert scheme.gain(depth, depth.sites()[-2], Role("self", part)) == 1.0


def test_omega_squared_is_linear_in_depth_as_the_variance_of_a_pre_norm_stream() -> None:
    size = {"M": 40, "d": 64, "heads": 4, "context": 8}
    squares = omegas(calibrated(build(ModelConfig(**size, scheme="admin"), 32, 0)))[:, 0].square().numpy()
    sites = np.arange(len(squares))
    slope, start = np.polyfit(sites, squares, 1)
    assert np.abs(squares - (start + slope * sites)).max() < 0.1 * squares[-1]
    # So a branch's share of the sum falls as 1 / depth; without omega (Post-Norm) it stays what the first one's is.
    shares = np.diff(squares) / squares[1:]
    assert shares[0] > 0.2
    assert shares[-20:].mean() * 70 == pytest.approx(1.0, abs=0.15)


def test_what_is_compiled_is_profiled_like_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: real(f, backend="eager", fullgraph=True))
    eager, compiled = (calibrated(build(ModelConfig(**MODEL | {"M": 6, "compile": c}), 32, 0)) for c in (False, True))
    assert torch.equal(omegas(eager), omegas(compiled))
    counters.clear()
    torch.testing.assert_close(compiled(TOKENS), eager(TOKENS))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_run_calibrates_alike_whatever_was_drawn_before(tmp_path: Path) -> None:
    found = []
    for i in range(2):
        torch.manual_seed(i)
        found.append(run(config(tmp_path / str(i), model=MODEL | {"dropout": 0.3}, train={"steps": 8})))
    one, other = (end_state(result.run_dir, step=8)[0] for result in found)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_resumed_run_goes_on_from_the_omegas_of_its_checkpoint(tmp_path: Path) -> None:
    setting = {"model": MODEL, "train": {"optim": {"lr": 0.05}}}
    whole = run(config(tmp_path / "whole", **setting))
    parted = config(tmp_path / "parted", **setting)
    interrupted(parted, at=5)
    _, from_step = resumed(parted)
    assert from_step == 4
    one, other = (end_state(tmp_path / name / whole.run_id)[0] for name in ("whole", "parted"))
    names = [name for name in one if name.endswith("own.alpha")]
    assert len(names) == 4
    for name in names:
        assert torch.equal(one[name], other[name])
        assert one[name].std() > 1e-3  # trained: no longer one number for all channels
