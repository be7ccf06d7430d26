"""LayerScale: Pre-Norm with a multiplier for each channel, whose start is by depth."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.attention import Context
from normscale.models.builder import build
from normscale.models.plan import resolve
from normscale.schemes import Depth
from normscale.schemes.layerscale import LayerScale
from tests.schemes.gains import SINGLE, gains

SIZE = {"d": 16, "heads": 2, "context": 8, "scheme": "layerscale", "positions": "sinusoidal"}
TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
STARTS = {1: 0.1, 6: 0.1, 18: 0.1, 19: 1e-5, 24: 1e-5, 25: 1e-6, 100: 1e-6, 1000: 1e-6}


def norm(x: torch.Tensor, layer: Any) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], layer.gamma, layer.bias, 1e-5)


@pytest.mark.parametrize(("N", "M"), [(3, 0), (0, 3)])
def test_the_stack_equals_its_formula(N: int, M: int) -> None:
    model: Any = build(ModelConfig(**SIZE, N=N, M=M), 32, 0)
    with torch.no_grad():  # multipliers and gains that tell channels and sites apart
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x = model.token[TOKENS] * 4.0 + model.sinusoids
    for sublayer in model.sublayers():
        x = x + sublayer.own.g * sublayer.branch(norm(x, sublayer.own.norm), Context())
    torch.testing.assert_close(model.features(TOKENS), norm(x, model.ends.norm), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("blocks", STARTS)
def test_multipliers_start_by_depth(blocks: int) -> None:
    scheme = LayerScale()
    assert scheme.start(Depth(blocks, 0)) == scheme.start(Depth(0, blocks)) == STARTS[blocks]
    assert LayerScale(LayerScale.Options(start=1e-4)).start(Depth(0, blocks)) == 1e-4
    with pytest.raises(ValidationError, match=r"ends at 3\.4e\+38"):
        LayerScale.Options(start=1e39)


def test_every_channel_of_every_site_has_one() -> None:
    model: Any = build(ModelConfig(**SIZE, M=19), 32, 0)
    for sublayer in model.sublayers():
        assert torch.equal(sublayer.own.g, torch.full((16,), 1e-5))


@pytest.mark.parametrize("depth", SINGLE, ids=str)
def test_every_gain_is_one(depth: Depth) -> None:
    assert set(gains(LayerScale(), depth).values()) == {1.0}


def test_a_deep_stack_begins_as_its_embedding_and_pre_norm_does_not() -> None:
    apart = {}
    for scheme in ("layerscale", "pre"):
        outputs: list[torch.Tensor] = []
        build(ModelConfig(**SIZE | {"scheme": scheme}, M=30), 32, 0).features(TOKENS, outputs=outputs)
        apart[scheme] = float((outputs[-1] - outputs[0]).norm() / outputs[0].norm())
    assert apart["layerscale"] < 1e-4 < 1.0 < apart["pre"]


def test_two_stacks_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'layerscale' has no encoder-decoder form"):
        resolve(ModelConfig(**SIZE, N=2, M=2))
