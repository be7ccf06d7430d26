"""ReZero: the identity at first, its formula after, and no norm that a configuration could set."""

from typing import Any

import pytest
import torch

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.attention import Context
from normscale.models.builder import build
from normscale.models.init import weights
from normscale.models.plan import resolve
from normscale.norms import Norm
from normscale.schemes import Depth
from normscale.schemes.rezero import ReZero
from tests.schemes.gains import TOPOLOGIES, gains

SIZE = {"d": 16, "heads": 2, "context": 8, "scheme": "rezero", "positions": "sinusoidal"}
TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))


def embedded(model: Any) -> torch.Tensor:
    return model.token[TOKENS] * 4.0 + model.sinusoids


@pytest.mark.parametrize("start", [0.0, 0.3])
def test_the_stack_equals_its_formula(start: float) -> None:
    model: Any = build(ModelConfig(**SIZE, M=6, scheme_options={"start": start}), 32, 0)
    x = embedded(model)
    for i, sublayer in enumerate(model.sublayers()):
        assert float(sublayer.own.a) == pytest.approx(start)
        with torch.no_grad():
            sublayer.own.a.add_(0.1 * i * (start != 0))
        x = x + (start + 0.1 * i * (start != 0)) * sublayer.branch(x, Context())
    torch.testing.assert_close(model.features(TOKENS), x, rtol=1e-4, atol=1e-5)
    assert torch.equal(x, embedded(model)) is (start == 0.0)  # a fresh model is the identity


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
