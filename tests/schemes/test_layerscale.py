"""LayerScale: Pre-Norm with a multiplier for each channel, whose start is by depth."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.builder import build
from normscale.models.plan import resolve
from normscale.schemes import Depth
from normscale.schemes.layerscale import LayerScale
from tests.schemes.gains import SINGLE, gains
from tests.schemes.written import FORMS, TOKENS, branch, compare, ln, made

SIZE = {"d": 16, "heads": 2, "context": 8, "scheme": "layerscale", "positions": "sinusoidal"}
STARTS = {1: 0.1, 6: 0.1, 18: 0.1, 19: 1e-5, 24: 1e-5, 25: 1e-6, 100: 1e-6, 1000: 1e-6}


def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
    for layer in layers:
        x = x + layer.own.g * branch(layer, ln(x, layer.own.norm))
    return ln(x, ends.norm)


@pytest.mark.parametrize("form", ["encoder", "decoder"])
def test_the_stack_equals_its_formula(form: str) -> None:
    compare(made("layerscale", *FORMS[form]), stack)


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
        outputs: list[Tensor] = []
        build(ModelConfig(**SIZE | {"scheme": scheme}, M=30), 32, 0).features(TOKENS, outputs=outputs)
        apart[scheme] = float((outputs[-1] - outputs[0]).norm() / outputs[0].norm())
    assert apart["layerscale"] < 1e-4 < 1.0 < apart["pre"]


def test_two_stacks_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'layerscale' has no encoder-decoder form"):
        resolve(ModelConfig(**SIZE, N=2, M=2))
