"""HybridNorm and HybridNorm*: norms on q, k and v, and one Post-Norm a block."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.plan import resolve
from normscale.schemes.hybridnorm import HybridNorm
from tests.schemes.test_theory import slopes
from tests.schemes.written import assert_unit_gains, attention, compare, feedforward, ln, made, norm, owned


def normed(layer: Any, *, full: bool) -> Callable[[str, Tensor], Tensor]:
    def qkv(name: str, t: Tensor) -> Tensor:
        each = getattr(layer.branch.slots.qkv, name)
        if not full:
            return ln(t, each)
        return ln(t.transpose(1, 2).flatten(2), each).unflatten(-1, (t.shape[1], -1)).transpose(1, 2)

    return qkv


def stack_of(*, star: bool, full: bool) -> Any:
    def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
        for i, (attn, ffn) in enumerate(zip(layers[::2], layers[1::2], strict=True)):
            if star and i == 0:
                y = x + attention(attn, ln(x, attn.own.norm), qkv=normed(attn, full=full))
                x = y + feedforward(ffn, ln(y, ffn.own.norm))
            else:
                z = ln(x + attention(attn, x, qkv=normed(attn, full=full)), attn.own.norm)
                x = z + feedforward(ffn, z)
        return ln(x, ends.norm)

    return stack


@pytest.mark.parametrize(("N", "M"), [(3, 0), (0, 4)])
@pytest.mark.parametrize("star", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_the_stack_equals_its_formula(N: int, M: int, star: bool, full: bool) -> None:
    model = made("hybridnorm", N, M, star=star, qkv_norm="full" if full else "head")
    compare(model, stack_of(star=star, full=full))


def test_what_it_owns_and_its_structures() -> None:
    assert_unit_gains(HybridNorm())
    for full, width in ((False, 8), (True, 16)):
        model = made("hybridnorm", 0, 3, star=True, qkv_norm="full" if full else "head")
        found = owned(model)
        qkv = norm("own.norm")
        for name in "qkv":
            qkv |= norm(f"branch.slots.qkv.{name}", width)
        assert found.pop("ends") == norm("norm")
        assert found.pop("decoder.0000.ffn") == norm("own.norm")  # HybridNorm* alone
        assert found == {name: qkv if name.endswith("self") else {} for name in found}
        assert model.structures == 2
    plain = made("hybridnorm", 0, 3)
    assert owned(plain)["decoder.0000.ffn"] == {}
    assert plain.structures == 1


def test_at_the_standard_init_it_behaves_as_post_norm_does() -> None:
    # Why its authors draw output projections smaller: the stream stays, and the first update grows as Post-Norm's.
    assert abs(slopes("hybridnorm")["variance"]) < 0.05
    assert slopes("hybridnorm")["sgd"] > 1.0 > slopes("pre")["sgd"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"qk_norm": "head"}, r"model.qk_norm: 'head' makes no sense with scheme=hybridnorm"),
        ({"heads": 16, "d": 16, "positions": "learned"}, r"model.heads: 16 makes no sense .*heads of one channel"),
        ({"N": 2}, r"model.scheme: 'hybridnorm' has no encoder-decoder form"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(ModelConfig(**{"scheme": "hybridnorm"} | options))


def test_all_heads_as_one_vector_may_have_one_channel_each() -> None:
    options: dict[str, Any] = {"heads": 16, "d": 16, "positions": "learned"}
    resolve(ModelConfig(scheme="hybridnorm", scheme_options={"qkv_norm": "full"}, **options))
