"""B2T: the skip over the block, what it does to gradients, and the released init."""

from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.plan import resolve
from normscale.schemes.b2t import B2T
from tests.schemes.test_theory import slopes
from tests.schemes.written import (
    BOTH,
    DEPTHS,
    FORMS,
    TOKENS,
    assert_unit_gains,
    beside,
    branch,
    compare,
    gains,
    ln,
    made,
    norm,
    owned,
)


@pytest.mark.parametrize(("N", "M"), [*DEPTHS, *BOTH])
def test_every_matrix_of_a_side_is_scaled_by_the_root_of_its_blocks(N: int, M: int) -> None:
    for (side, *_), found in gains(B2T(B2T.Options(rescaled=True)), N, M).items():
        assert len(found) == 1
        assert found.pop() == pytest.approx((N if side == "encoder" else M) ** -0.5)
    assert all(found == {1.0} for found in gains(B2T(B2T.Options(rescaled=True)), N, M, bias=True).values())
    assert_unit_gains(B2T())


def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
    bottom = x
    for layer in layers:
        if layer.site.kind == "ffn":
            x = bottom = ln(bottom + x + branch(layer, x), layer.own.norm)
        else:
            x = ln(x + branch(layer, x, memory), layer.own.norm)
    return x


@pytest.mark.parametrize("form", FORMS)
def test_the_stack_equals_its_formula(form: str) -> None:
    compare(made("b2t", *FORMS[form]), stack)


@pytest.mark.parametrize("form", FORMS)
def test_without_its_bypass_it_is_post_norm(form: str) -> None:
    one, other, with_it = (
        made(name, *FORMS[form], **o) for name, o in (("b2t", {"bypass": False}), ("post", {}), ("b2t", {}))
    )
    source = beside(form)
    assert torch.equal(one(TOKENS, **source), other(TOKENS, **source))
    assert not torch.allclose(with_it(TOKENS, **source), other(TOKENS, **source), rtol=1e-2)


def test_what_it_owns() -> None:
    model = made("b2t", 2, 2)
    found = owned(model)
    assert (found.pop("ends"), found.pop("source ends")) == ({}, {})
    assert found == {name: norm("own.norm") for name in found}
    assert (model.structures, model.stream_count, model.rows_per_site) == (2, 1, 3)


def test_its_first_update_grows_as_that_of_post_norm_unless_drawn_smaller() -> None:
    assert slopes("b2t")["sgd"] > 1.0
    rescaled = slopes("b2t-rescaled")  # N^(-1/2) for each of a branch's two matrices is as much as DeepNorm does
    assert rescaled["sgd"] == pytest.approx(0.0, abs=0.1)
    assert rescaled["sign"] == pytest.approx(0.5, abs=0.08)
    assert rescaled["first"] == pytest.approx(-0.5, abs=0.03)


def test_an_extra_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scheme_options.final_norm: makes no sense with scheme=b2t"):
        resolve(ModelConfig(scheme="b2t", scheme_options={"final_norm": True}))
