"""Sandwich-LN is Peri-Norm's graph under the name it was first published by."""

from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.plan import resolve
from normscale.schemes.sandwich import SandwichNorm
from tests.schemes.written import TOKENS, assert_unit_gains, branch, compare, ln, made, norm, owned


def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
    for layer in layers:
        x = x + ln(branch(layer, ln(x, layer.own.norm)), layer.own.out_norm)
    return ln(x, ends.norm)


@pytest.mark.parametrize(("N", "M"), [(3, 0), (0, 3)])
def test_the_stack_equals_its_formula(N: int, M: int) -> None:
    compare(made("sandwich", N, M), stack)


def test_it_is_peri_norm_to_the_bit() -> None:
    one, other = made("sandwich", 0, 3), made("peri", 0, 3)
    assert torch.equal(one(TOKENS), other(TOKENS))
    assert owned(one) == owned(other)


def test_what_it_owns() -> None:
    assert_unit_gains(SandwichNorm())
    found = owned(made("sandwich", 0, 2))
    assert found.pop("ends") == norm("norm")
    assert found == {name: norm("own.norm") | norm("own.out_norm") for name in found}


def test_an_encoder_beside_a_decoder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.scheme: 'sandwich' has no encoder-decoder form"):
        resolve(ModelConfig(N=2, M=2, scheme="sandwich"))
