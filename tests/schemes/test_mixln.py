"""Mix-LN: how many blocks are Post-Norm, and that the rest is Pre-Norm."""

from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.plan import resolve
from normscale.schemes import Depth
from normscale.schemes.mixln import MixLN
from tests.schemes.written import TOKENS, assert_unit_gains, branch, compare, ln, made, norm, owned

SHARES = [(0.25, 12, 3), (0.25, 24, 6), (0.25, 1000, 250), (0.25, 18, 4), (0.25, 6, 1), (0.29, 100, 29), (0.3, 10, 3)]
EDGES = [(0.25, 3, 1), (0.25, 1, 1), (0.0, 12, 0), (1.0, 12, 12), (0.99, 12, 11)]


@pytest.mark.parametrize(("share", "blocks", "post"), SHARES + EDGES)
def test_the_share_of_post_norm_blocks_is_rounded_down(share: float, blocks: int, post: int) -> None:
    scheme = MixLN(MixLN.Options(share=share))
    assert [scheme.post_blocks(depth) for depth in (Depth(0, blocks), Depth(blocks, 0))] == [post, post]


def stack_of(post: int) -> Any:
    def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
        for i, layer in enumerate(layers):
            if i < 2 * post:
                x = ln(x + branch(layer, x), layer.own.norm)
            else:
                x = x + branch(layer, ln(x, layer.own.norm))
        return ln(x, ends.norm)

    return stack


@pytest.mark.parametrize(("N", "M", "share", "post"), [(5, 0, 0.4, 2), (0, 5, 0.4, 2), (0, 5, 0.25, 1), (0, 5, 0.9, 4)])
def test_the_stack_equals_its_formula(N: int, M: int, share: float, post: int) -> None:
    compare(made("mixln", N, M, share=share), stack_of(post))


@pytest.mark.parametrize(("share", "scheme"), [(0.0, "pre"), (1.0, "post")])
@pytest.mark.parametrize(("N", "M"), [(3, 0), (0, 3)])
def test_with_one_side_empty_it_is_the_other(share: float, scheme: str, N: int, M: int) -> None:
    one, other = made("mixln", N, M, share=share), made(scheme, N, M)
    assert torch.equal(one(TOKENS), other(TOKENS))
    assert not torch.equal(made("mixln", N, M, share=0.4)(TOKENS), other(TOKENS))


def test_what_it_owns_and_its_two_structures() -> None:
    assert_unit_gains(MixLN())
    found = owned(made("mixln", 0, 4))
    assert found.pop("ends") == norm("norm")
    assert found == {name: norm("own.norm") for name in found}
    assert owned(made("mixln", 0, 4, share=1.0))["ends"] == {}
    assert [made("mixln", 0, 4, share=share).structures for share in (0.0, 0.25, 0.75, 1.0)] == [1, 2, 2, 1]


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.scheme: 'mixln' has no encoder-decoder form"):
        resolve(ModelConfig(N=2, M=2, scheme="mixln"))
    with pytest.raises(ConfigError, match=r"model.scheme_options.share: 1.5: .*less than or equal to 1"):
        resolve(ModelConfig(scheme="mixln", scheme_options={"share": 1.5}))
