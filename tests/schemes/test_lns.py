"""LayerNorm-Scaling: the scale of every block, and a stream that grows as the logarithm of depth."""

import math
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.plan import resolve
from normscale.schemes import Depth, Make
from normscale.schemes.lns import LayerNormScaling
from tests.schemes.test_theory import slopes, variances
from tests.schemes.written import assert_unit_gains, branch, compare, constants, ln, made, norm, owned


def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
    for i, layer in enumerate(layers):
        x = x + branch(layer, ln(x, layer.own.norm) / math.sqrt(i // 2 + 1))
    return ln(x, ends.norm)


@pytest.mark.parametrize(("N", "M"), [(4, 0), (0, 4)])
def test_the_stack_equals_its_formula(N: int, M: int) -> None:
    compare(made("lns", N, M), stack)


@pytest.mark.parametrize("blocks", [1, 6, 18, 100, 1000])
def test_the_scale_counts_blocks_from_one_and_is_the_same_for_both_sublayers(blocks: int) -> None:
    scheme, make = LayerNormScaling(), Make(4, 1, 4, 4, lambda: None, None)  # type: ignore[arg-type,return-value]
    for depth in (Depth(blocks, 0), Depth(0, blocks)):
        found = [scheme.own(depth, site, make)["scale"] for site in depth.sites()]
        assert found == pytest.approx([1 / math.sqrt(i // 2 + 1) for i in range(2 * blocks)])


def test_what_it_owns() -> None:
    assert_unit_gains(LayerNormScaling())
    model = made("lns", 0, 3)
    assert constants(model, "scale") == pytest.approx([1, 1, 0.70711, 0.70711, 0.57735, 0.57735], abs=1e-5)
    found = owned(model)
    assert found.pop("ends") == norm("norm")
    assert found == {name: norm("own.norm") for name in found}
    assert model.structures == 1


def test_the_stream_grows_as_the_logarithm_of_depth_and_that_of_pre_norm_linearly() -> None:
    # The variance of a branch is about 1/l: a harmonic sum, every doubling adds as much. The paper's bound from below,
    # Theta(L), does not hold at init.
    at = [4, 8, 16, 32]
    lns, pre = ([variances(scheme, 32)[block] for block in at] for scheme in ("lns", "pre"))
    harmonic = [float(np.sum(1 / np.arange(1, block + 1))) for block in at]
    for found, low, high in ((lns, 1.0, 1.5), (pre, 3.0, 6.0)):
        ratio = np.diff(found) / np.diff(harmonic)
        assert low < ratio[-1] / ratio[0] < high
    assert lns[-1] < 0.25 * pre[-1]


def test_its_variance_and_first_update_grow_less_with_depth_than_those_of_pre_norm() -> None:
    lns, pre = slopes("lns"), slopes("pre")
    assert lns["variance"] < 0.4 < 0.9 < pre["variance"]
    assert lns["sgd"] + 0.1 < pre["sgd"]
    assert lns["sign"] + 0.1 < pre["sign"]


def test_a_scaled_init_beside_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.init_scaled: .* makes no sense with scheme=lns: .*remove one"):
        resolve(ModelConfig(scheme="lns", init_scaled=True))
    resolve(ModelConfig(scheme="lns"))
    with pytest.raises(ConfigError, match=r"model.scheme: 'lns' has no encoder-decoder form"):
        resolve(ModelConfig(N=2, M=2, scheme="lns"))
