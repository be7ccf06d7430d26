"""Peri- and reordered norm against formulas written out here, in every topology they have."""

from typing import Any

import pytest
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.plan import resolve
from tests.schemes.written import FORMS, branch, compare, made


def norm(x: Tensor, layer: Any) -> Tensor:
    """RMSNorm whose gain is zero-centred."""
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + layer.gamma)


def peri(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
    for layer in layers:
        x = x + norm(branch(layer, norm(x, layer.own.norm), memory), layer.own.out_norm)
    return norm(x, ends.norm)


def reordered(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
    for layer in layers:
        x = x + norm(branch(layer, x), layer.own.norm)
    return norm(x, ends.norm)


@pytest.mark.parametrize(
    ("stack", "form"), [*((peri, form) for form in FORMS), (reordered, "encoder"), (reordered, "decoder")]
)
def test_the_stack_equals_its_formula(stack: Any, form: str) -> None:
    model = {"norm": "rmsnorm", "norm_options": {"zero_centred": True}}
    compare(made(stack.__name__, *FORMS[form], model=model), stack)


def test_a_reordered_norm_in_an_encoder_beside_a_decoder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.scheme: 'reordered' has no encoder-decoder form"):
        resolve(ModelConfig(N=2, M=2, scheme="reordered"))
