"""SpanNorm: the feed-forward skip starts below attention, and the first attention reads a normed input."""

from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.plan import resolve
from normscale.ops.statistics import Buffers
from normscale.schemes.spannorm import SpanNorm
from tests.schemes.test_theory import slopes
from tests.schemes.written import TOKENS, assert_unit_gains, attention, compare, feedforward, ln, made, norm, owned


def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
    for i, (attn, ffn) in enumerate(zip(layers[::2], layers[1::2], strict=True)):
        y = ln(x + attention(attn, ln(x, attn.own.in_norm) if i == 0 else x), attn.own.norm)
        x = ln(x + feedforward(ffn, y), ffn.own.norm)
    return x


@pytest.mark.parametrize(("N", "M"), [(3, 0), (0, 3)])
def test_the_stack_equals_its_formula(N: int, M: int) -> None:
    compare(made("spannorm", N, M), stack)


def test_what_it_owns_and_its_two_structures() -> None:
    assert_unit_gains(SpanNorm())
    model = made("spannorm", 0, 3)
    found = owned(model)
    assert found.pop("ends") == {}
    assert found.pop("decoder.0000.self") == norm("own.in_norm") | norm("own.norm")
    assert found == {name: norm("own.norm") for name in found}
    assert model.structures == 2


@pytest.mark.parametrize("scheme", ["spannorm", "b2t"])
def test_of_a_site_the_stream_after_it_and_the_sum_before_its_norm_are_measured(scheme: str) -> None:
    model = made(scheme, 0, 2).float()
    rows, seen = torch.zeros(4 * model.rows_per_site, 3), []
    for layer in model.sublayers():
        layer.own.norm.register_forward_hook(lambda _, args, y: seen.append((args[0], y)))
    model(TOKENS, Buffers(rows))
    for i, (z, y) in enumerate(seen):
        torch.testing.assert_close(rows[3 * i + 1, 0], y.square().sum(), rtol=1e-4, atol=0.0)
        torch.testing.assert_close(rows[3 * i + 2, 0], z.square().sum(), rtol=1e-4, atol=0.0)


def test_at_the_standard_init_its_stream_stays_and_its_update_grows() -> None:
    assert abs(slopes("spannorm")["variance"]) < 0.02
    assert 1.0 < slopes("spannorm")["sgd"] < slopes("post")["sgd"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"N": 2}, "model.scheme: 'spannorm' has no encoder-decoder form"),
        ({"scheme_options": {"final_norm": True}}, "scheme_options.final_norm: makes no sense with scheme=spannorm"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(ModelConfig(**{"scheme": "spannorm"} | options))
