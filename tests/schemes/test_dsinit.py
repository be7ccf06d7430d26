"""DS-Init: Post-Norm, whose block l is drawn smaller by the root of l."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.models.init import weights
from normscale.schemes import Depth
from normscale.schemes.dsinit import DSInit
from tests.schemes.gains import TOPOLOGIES, gains
from tests.schemes.written import FORMS, TOKENS, branch, compare, ln, made

SIZE = {"d": 64, "heads": 2, "context": 8, "init": "xavier_uniform"}
CONSTANTS: dict[str, tuple[dict[str, Any], float, float]] = {
    "paper": ({}, -1 / 2, 1.0),
    "release": ({"constants": "release", "a": 0.5}, -1 / 4, 0.5**0.5),
}


@pytest.mark.parametrize("constants", CONSTANTS)
@pytest.mark.parametrize("depth", TOPOLOGIES, ids=str)
def test_gains_of_every_role_fall_with_the_block(depth: Depth, constants: str) -> None:
    options, power, a = CONSTANTS[constants]
    found = gains(DSInit(DSInit.Options(**options)), depth)
    for (side, block, kind, part), gain in found.items():
        want = a * (block + 1) ** power if side else 1.0
        assert gain == pytest.approx(want), (side, block, kind, part)
    last = found["decoder" if depth.M else "encoder", max(depth.M or depth.N, 1) - 1, "ffn", "out"]
    assert last == pytest.approx(a * (depth.M or depth.N) ** power)


def test_drawn_values_fill_the_papers_interval() -> None:
    model = build(ModelConfig(**SIZE, scheme="dsinit", N=3, M=2), 32, 0)
    for weight in weights(model):
        if weight.site is not None and not weight.role.bias:
            rows, columns = weight.values.shape
            bound = math.sqrt(6 / (rows + columns)) / math.sqrt(weight.site.block + 1)
            assert 0.98 * bound < float(weight.values.abs().max()) <= bound, weight.name
            assert float(weight.values.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05), weight.name


def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
    for layer in layers:
        x = ln(x + branch(layer, x, memory), layer.own.norm)
    return x


@pytest.mark.parametrize("form", FORMS)
def test_the_stack_equals_its_formula(form: str) -> None:
    compare(made("dsinit", *FORMS[form]), stack)


def test_but_for_the_init_it_is_post_norm() -> None:
    one, post = (build(ModelConfig(**SIZE, scheme=scheme, M=4), 32, 0) for scheme in ("dsinit", "post"))
    assert not torch.allclose(one(TOKENS), post(TOKENS), atol=1e-3)
    post.load_state_dict(one.state_dict())
    assert torch.equal(one(TOKENS), post(TOKENS))
    for a, b in zip(weights(one), weights(build(ModelConfig(**SIZE, scheme="post", M=4), 32, 0)), strict=True):
        gain = 1.0 if a.site is None else (a.site.block + 1) ** -0.5
        torch.testing.assert_close(a.values, gain * b.values)
