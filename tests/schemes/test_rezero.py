"""ReZero: the identity at first, its formula after, and no norm that a configuration could set."""

from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.builder import build
from normscale.models.init import weights
from normscale.models.plan import resolve
from normscale.norms import Norm
from normscale.schemes import Depth
from normscale.schemes.rezero import ReZero
from tests.schemes.gains import TOPOLOGIES, gains
from tests.schemes.written import FORMS, TOKENS, branch, compare, made

SIZE = {"d": 16, "heads": 2, "context": 8, "scheme": "rezero", "positions": "sinusoidal"}


def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
    for layer in layers:
        x = x + layer.own.a * branch(layer, x, memory)
    return x


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("start", [0.0, 0.3])
def test_the_stack_equals_its_formula(start: float, form: str) -> None:
    compare(made("rezero", *FORMS[form], start=start), stack)
    fresh = made("rezero", *FORMS[form], perturbed=False, start=start)
    assert all(layer.own.a.tolist() == [pytest.approx(start)] for layer in fresh.sublayers())


@pytest.mark.parametrize("form", FORMS)
def test_a_fresh_model_is_the_identity(form: str) -> None:
    compare(made("rezero", *FORMS[form], perturbed=False), lambda layers, ends, x, memory: x, tolerance=0.0)


def test_at_first_the_numbers_alone_have_gradients_inside_the_blocks() -> None:
    model = build(ModelConfig(**SIZE, M=3), 32, 0)
    torch.nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
    for name, p in model.named_parameters():
        if name.startswith("blocks"):
            assert p.grad is not None, name
            assert bool(p.grad.any()) is name.endswith("own.a"), name


@pytest.mark.parametrize("depth", TOPOLOGIES, ids=str)
def test_every_gain_is_one(depth: Depth) -> None:
    assert set(gains(ReZero(), depth).values()) == {1.0}


def test_there_are_no_norms_and_none_can_be_set() -> None:
    model = build(ModelConfig(**SIZE, N=2, M=2), 32, 0)
    assert not [module for module in model.modules() if isinstance(module, Norm)]
    owned = {name for name, _ in model.named_parameters()} - {weight.name for weight in weights(model)}
    assert owned == {f"{prefix}.own.a" for prefix, _ in model.named_sublayers()}
    for name, value in (("norm", "rmsnorm"), ("norm_options", {"bias": False}), ("eps", 1e-3)):
        with pytest.raises(ConfigError, match=f"model.{name}: .* would do nothing with model.scheme=rezero, which has"):
            resolve(ModelConfig(**SIZE, M=2, **{name: value}))
        resolve(ModelConfig(**SIZE, M=2, qk_norm="head", **{name: value}))  # where it is read
