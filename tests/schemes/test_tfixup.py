"""T-Fixup: which parameters get which gain, and what the init is for."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.models.init import weights
from normscale.norms import Norm
from normscale.schemes import Depth
from normscale.schemes.tfixup import TFixup
from tests.schemes.gains import DOUBLE, SINGLE, gains
from tests.schemes.written import FORMS, TOKENS, branch, compare, made

# 0.67 N^(-1/4), (9N)^(-1/4) and (4N)^(-1/4), to five digits.
TABLE = {
    1: (0.67, 0.57735, 0.70711),
    6: (0.42809, 0.36889, 0.45180),
    18: (0.32528, 0.28030, 0.34329),
    100: (0.21187, 0.18257, 0.22361),
    1000: (0.11914, 0.10267, 0.12574),
}
SIZE = {"d": 16, "heads": 2, "context": 8, "scheme": "tfixup", "positions": "sinusoidal"}
SCALED = ("v", "o", "in", "out")


@pytest.mark.parametrize("depth", DOUBLE, ids=str)
def test_gains_of_encoder_and_decoder(depth: Depth) -> None:
    found = gains(TFixup(), depth)
    assert len({key[1:] for key in found}) >= 4 + 13
    for (side, _, kind, part), gain in found.items():
        sides = {"encoder": 0.67 * depth.N ** (-1 / 4), "decoder": (9 * depth.M) ** (-1 / 4), "": 1.0}
        want = sides[side] if part in SCALED else 1.0
        want = (9 * depth.N) ** (-1 / 4) if part == "token" else want
        assert gain == pytest.approx(want), (side, kind, part)
    if depth.N == depth.M:
        encoder, decoder, _ = TABLE[depth.N]
        got = (found["encoder", 0, "ffn", "in"], found["decoder", 0, "cross", "v"], found["", -1, "embedding", "token"])
        assert got == pytest.approx((encoder, decoder, decoder), abs=2e-5)


@pytest.mark.parametrize("depth", SINGLE, ids=str)
def test_gains_of_a_single_stack_bound_the_update(depth: Depth) -> None:
    found = gains(TFixup(), depth)
    for (side, _, kind, part), gain in found.items():
        want = TABLE[depth.single][2] if part in (*SCALED, "token") else 1.0
        assert gain == pytest.approx(want, abs=2e-5), (side, kind, part)
    weight, vectors = found["encoder" if depth.N else "decoder", 0, "ffn", "in"], found["", -1, "embedding", "token"]
    assert 2 * depth.single * 2 * weight**2 * vectors**2 == pytest.approx(1.0)


def test_drawn_values_have_these_gains_and_there_is_nothing_else() -> None:
    model = build(ModelConfig(**SIZE | {"d": 128}, N=6, M=18), 256, 0)
    assert not [module for module in model.modules() if isinstance(module, Norm)]
    assert {weight.name for weight in weights(model)} == {name for name, _ in model.named_parameters()}
    for weight in weights(model):
        if weight.role.bias:
            assert not weight.values.any()
            continue
        standard = 128**-0.5 if weight.site is None else math.sqrt(2 / sum(weight.values.shape))
        gain = 1.0
        if weight.role.part == "token":
            gain = TABLE[6][1]
        elif weight.site is not None and weight.role.part in SCALED:
            gain = TABLE[6][0] if weight.site.side == "encoder" else TABLE[18][1]
        assert float(weight.values.std()) == pytest.approx(gain * standard, rel=0.03), weight.name


def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
    for layer in layers:
        x = x + branch(layer, x, memory)
    return x


@pytest.mark.parametrize("form", FORMS)
def test_the_stack_equals_its_formula(form: str) -> None:
    compare(made("tfixup", *FORMS[form]), stack)


def moved(scheme: str, blocks: int) -> float:
    """How far one SGD step moves the output, over the step's rate; of weights alone, which the condition counts."""
    size = SIZE | {"scheme": scheme, "positions": "rope", "bias": False}
    model: Any = build(ModelConfig(**size, M=blocks), 32, 0).double()
    before = model.features(TOKENS)
    direction = torch.randn(before.shape, dtype=before.dtype, generator=torch.Generator().manual_seed(2))
    (before * direction / direction.norm()).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(1e-6 * p.grad)
        return float((model.features(TOKENS) - before).norm()) / 1e-6


def test_the_update_does_not_grow_with_depth_and_without_the_init_it_explodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.5 < moved("tfixup", 64) / moved("tfixup", 4) < 1.5
    monkeypatch.setattr(TFixup, "gain", lambda *_: 1.0)
    assert moved("tfixup", 16) / moved("tfixup", 4) > 1000
