"""SiameseNorm against its formula in the paper's form and the release's."""

from itertools import pairwise
from math import sqrt
from typing import Any

import pytest
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.plan import resolve
from normscale.schemes import Depth, Role
from normscale.schemes.siamese import SiameseNorm
from tests.schemes.test_residual import skip_gradient
from tests.schemes.written import FORMS, branch, compare, ln, made

FACTORS = {
    "paper": lambda block: sqrt(block + 1),
    "release": lambda block: sqrt(2 * (block + 1)),
    "none": lambda block: 1.0,
}


# Norm(X + O / c) is made as Norm(c X + O): eps is c^2 times as small.


def paper(layers: list[Any], ends: Any, x: Tensor, factor: str, input_norm: bool) -> Tensor:
    y = x
    for layer in layers:
        own, c = layer.own, FACTORS[factor](layer.site.block)
        seen = x + ln(y, own.y_norm)
        out = branch(layer, ln(seen, own.in_norm) if input_norm else seen)
        x, y = ln(x + out / c, own.norm, 1e-5 / c**2), y + out
    return x + ln(y, ends.y_norm)


def release(layers: list[Any], ends: Any, x: Tensor, factor: str, input_norm: bool) -> Tensor:
    """As it is written there: the norm of X comes first in a block, and last of all there are three."""
    y, head, c = x, ends.x_norm, 1.0
    for layer in layers:
        own, x = layer.own, ln(x, head, 1e-5 / c**2)
        seen = x + ln(y, own.y_norm)
        out = branch(layer, ln(seen, own.in_norm) if input_norm else seen)
        head, c = own.norm, FACTORS[factor](layer.site.block)
        x, y = x + out / c, y + out
    return ln(ln(x, head, 1e-5 / c**2) + ln(y, ends.y_norm), ends.out_norm)


@pytest.mark.parametrize("form", ["encoder", "decoder"])
@pytest.mark.parametrize("input_norm", [True, False])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("written", [paper, release])
def test_the_stack_equals_its_formula(written: Any, factor: str, input_norm: bool, form: str) -> None:
    model = made("siamese", *FORMS[form], form=written.__name__, factor=factor, input_norm=input_norm)
    compare(model, lambda layers, ends, x, memory: written(layers, ends, x, factor, input_norm))


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
