"""ResiDual against its formula, and what its second stream does to gradients at depth."""

from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.models.attention import Context
from normscale.models.builder import build
from normscale.ops.statistics import Buffers
from normscale.schemes import Depth, Make, Role
from normscale.schemes.residual import ResiDual
from tests.schemes.written import FORMS, TOKENS, branch, compare, ln, made

SIZE = {"d": 16, "heads": 2, "context": 8, "positions": "sinusoidal"}


def stack_of(s: float, a: float) -> Any:
    def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
        r = s * x
        for layer in layers:
            out = branch(layer, x, memory)
            x, r = ln(x + out, layer.own.norm), r + s * out
        return a * x + ln(r, ends.norm)

    return stack


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("s", "a"), [(1.0, 1.0), (0.25, 0.5)])
def test_the_stack_equals_its_formula(s: float, a: float, form: str) -> None:
    compare(made("residual", *FORMS[form], s=s, a=a), stack_of(s, a))


def test_s_changes_no_output_but_by_eps() -> None:
    one, small = (made("residual", 0, 3, model={"eps": 0.0}, s=s) for s in (1.0, 1e-3))
    torch.testing.assert_close(one(TOKENS), small(TOKENS))
    wide = made("residual", 0, 3, model={"eps": 0.1}, s=1e-3)
    assert (wide(TOKENS) - one(TOKENS)).abs().max() > 0.1


def test_both_streams_and_the_sum_are_measured_each_in_its_row() -> None:
    model = build(ModelConfig(**SIZE, M=3, scheme="residual", scheme_options={"s": 0.5}), 32, 0)
    assert (model.stream_count, model.rows_per_site) == (2, 4)
    buffers = Buffers(*(torch.zeros(6 * 4, columns) for columns in (3, 3, 1)))
    seen: list[tuple[Tensor, ...]] = []
    for sublayer in model.sublayers():
        sublayer.register_forward_hook(lambda m, given, out: seen.append((given[0][0], *out)))
    branches: list[Tensor] = []
    for sublayer in model.sublayers():
        sublayer.branch.register_forward_hook(lambda m, given, out: branches.append(out))
    model(TOKENS, buffers)
    for i, ((before, x, r), out) in enumerate(zip(seen, branches, strict=True)):
        want = torch.stack([t.square().sum() for t in (out, x, r, before + out)])
        torch.testing.assert_close(buffers.rows[4 * i : 4 * i + 4, 0], want.detach())
        torch.testing.assert_close(buffers.sums[4 * i + 1 : 4 * i + 3, 0], torch.stack([x.sum(), r.sum()]).detach())


@pytest.mark.parametrize("N", [1, 6, 18, 100, 1000])
def test_gains_and_constants_are_1_at_every_depth(N: int) -> None:
    scheme, make = ResiDual(), Make(4, 1, 4, 4, torch.nn.Identity, torch.Generator())
    for depth in (Depth(N, 0), Depth(0, N), Depth(N, 3)):
        for site in (depth.sites()[0], depth.sites()[-1]):
            own = scheme.own(depth, site, make)
            assert (own["alpha"], own["scale"]) == (1.0, 1.0)
            ends = scheme.own_ends(depth, site.side, make)
            assert (ends["s"], ends["a"]) == (1.0, 1.0)
            roles = [Role(kind, part) for kind, part in (("self", "v"), ("self", "o"), ("ffn", "in"), ("ffn", "out"))]
            assert {scheme.gain(depth, site, role) for role in roles} == {1.0}


def skip_gradient(scheme: str, blocks: int, **options: Any) -> float:
    """How much of the output's gradient reaches the embedding where branches are noise that depends on nothing."""
    config = ModelConfig(**SIZE | {"d": 64}, M=blocks, scheme=scheme, scheme_options=options)
    model, generator = build(config, 32, 0).double(), torch.Generator().manual_seed(1)
    for sublayer in model.sublayers():
        noise = torch.randn(4, 8, 64, generator=generator, dtype=torch.float64)
        sublayer.branch.register_forward_hook(lambda module, given, out, noise=noise: noise)
    emb = torch.randn(4, 8, 64, generator=generator, dtype=torch.float64).requires_grad_()
    out = model._run(emb, model.ends, range(blocks), Context(), None, None, None)
    readout = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    (grad,) = torch.autograd.grad((out * readout / readout.norm()).sum(), emb)
    return float(grad.norm())


def test_the_gradient_along_the_skips_falls_as_a_root_and_not_as_a_power() -> None:
    for blocks in (2, 4, 8):
        sites = 2 * blocks
        # A Post-Norm site halves the square: it normalises a sum of two parts that weigh alike.
        assert skip_gradient("post", blocks) == pytest.approx(2 ** (-sites / 2), rel=0.25)
        assert skip_gradient("pre", blocks) == pytest.approx((1 + sites) ** (-1 / 2), rel=0.05)
        both = (2 ** (-sites / 2), (1 + sites) ** (-1 / 2))
        assert skip_gradient("residual", blocks) == pytest.approx(sum(both), rel=0.1)
        assert skip_gradient("residual", blocks, a=0.0) == pytest.approx(both[1], rel=0.05)
