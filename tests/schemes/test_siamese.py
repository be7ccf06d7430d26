"""SiameseNorm against its formula in the paper's form and the release's."""

from itertools import pairwise
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.attention import Context
from normscale.models.plan import resolve
from normscale.schemes import Depth, Role
from normscale.schemes.siamese import SiameseNorm
from tests.schemes.test_residual import TOKENS, ln, shaken, skip_gradient

FACTORS = {
    "paper": lambda block: sqrt(block + 1),
    "release": lambda block: sqrt(2 * (block + 1)),
    "none": lambda block: 1.0,
}


def paper(x: Tensor, sublayers: list[Any], ends: Any, factor: str, input_norm: bool) -> Tensor:
    y = x
    for sublayer in sublayers:
        own, c = sublayer.own, FACTORS[factor](sublayer.site.block)
        seen = x + ln(y, own.y_norm)
        out = sublayer.branch(ln(seen, own.in_norm) if input_norm else seen, Context())
        x, y = ln(x + out / c, own.norm, 0.0), y + out
    return x + ln(y, ends.y_norm)


def release(x: Tensor, sublayers: list[Any], ends: Any, factor: str, input_norm: bool) -> Tensor:
    """As it is written there: the norm of X comes first in a block, and last of all there are three."""
    y, c = x, 1.0
    heads = [ends.x_norm, *(sublayer.own.norm for sublayer in sublayers)]
    for head, sublayer in zip(heads, sublayers, strict=False):
        own = sublayer.own
        x = ln(x, head, 1e-5 if head is ends.x_norm else 0.0)
        c = FACTORS[factor](sublayer.site.block)
        seen = x + ln(y, own.y_norm)
        out = sublayer.branch(ln(seen, own.in_norm) if input_norm else seen, Context())
        x, y = x + out / c, y + out
    return ln(ln(x, heads[-1], 0.0) + ln(y, ends.y_norm), ends.out_norm)


@pytest.mark.parametrize("side", ["N", "M"])
@pytest.mark.parametrize("input_norm", [True, False])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("form", [paper, release])
def test_the_stack_equals_its_formula(form: Any, factor: str, input_norm: bool, side: str) -> None:
    options = {"form": form.__name__, "factor": factor, "input_norm": input_norm}
    model = shaken(**{"N": 0, "M": 0} | {side: 3}, scheme="siamese", scheme_options=options)
    x = model.token[TOKENS] * 4.0 + model.sinusoids[:8]
    # Norm(X + O / c) is made as Norm(c X + O): eps is c^2 times as small.
    torch.testing.assert_close(
        model.features(TOKENS), form(x, model.sublayers(), model.ends, factor, input_norm), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("blocks", [1, 6, 18, 100, 1000])
@pytest.mark.parametrize("factor", FACTORS)
def test_constants_and_gains(factor: str, blocks: int) -> None:
    scheme = SiameseNorm(SiameseNorm.Options(factor=factor))
    for depth in (Depth(blocks, 0), Depth(0, blocks)):
        sites = depth.sites()
        assert [scheme.alpha(depth, site) for site in sites] == [FACTORS[factor](site.block) for site in sites]
        assert scheme.gain(depth, sites[-1], Role("ffn", "out")) == 1.0
        if factor != "none":
            assert all(scheme.alpha(depth, a) <= scheme.alpha(depth, b) for a, b in pairwise(sites))


def test_the_papers_form_is_what_is_built_unless_stated() -> None:
    options = SiameseNorm.Options()
    assert (options.form, options.factor, options.input_norm) == ("paper", "paper", True)


def test_the_plain_stream_keeps_the_gradient_that_the_normed_one_loses() -> None:
    """With equal weights (no factor) the normed stream halves the square at every site; the factor keeps more."""
    for blocks in (4, 8):
        sites = 2 * blocks
        want = 2 ** (-sites / 2) + (1 + sites) ** (-1 / 2)
        assert skip_gradient("siamese", blocks, factor="none") == pytest.approx(want, rel=0.1)
        # c^2 / (c^2 + 1) of the square at each of a block's two sites: 1 / (blocks + 1) in all.
        assert skip_gradient("siamese", blocks) == pytest.approx(1 / (blocks + 1) + (1 + sites) ** (-1 / 2), rel=0.1)


def test_a_stack_of_both_sides_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model.scheme: 'siamese' has no encoder-decoder form"):
        resolve(ModelConfig(N=2, M=2, scheme="siamese"))
