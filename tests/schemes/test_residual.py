"""ResiDual against its formula, and what its second stream does to gradients at depth."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.models.attention import Context
from normscale.models.builder import build
from normscale.ops.statistics import Buffers
from normscale.schemes import Depth, Make, Role
from normscale.schemes.residual import ResiDual

TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
SOURCE = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(1))
SIZE = {"d": 16, "heads": 2, "context": 8, "positions": "sinusoidal"}


def shaken(**settings: Any) -> Any:
    """A model in fp64 no two of whose gains and biases are alike: one left out, or taken for another, shows."""
    model = build(ModelConfig(**SIZE | {"scheme": "residual"} | settings), 32, 0).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def ln(x: Tensor, norm: Any, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.gamma, norm.bias, eps)


def stack(x: Tensor, sublayers: list[Any], ends: Any, context: Context, s: float, a: float) -> Tensor:
    r = s * x
    for sublayer in sublayers:
        out = sublayer.branch(x, context)
        x, r = ln(x + out, sublayer.own.norm), r + s * out
    return a * x + ln(r, ends.norm)


@pytest.mark.parametrize(("N", "M"), [(3, 0), (0, 3), (2, 3)])
@pytest.mark.parametrize(("s", "a"), [(1.0, 1.0), (0.25, 0.5)])
def test_the_stack_equals_its_formula(s: float, a: float, N: int, M: int) -> None:
    model = shaken(N=N, M=M, scheme_options={"s": s, "a": a})
    embedded = {n: model.token[t] * 4.0 + model.sinusoids[: t.shape[1]] for n, t in (("x", TOKENS), ("s", SOURCE))}
    sublayers, source = model.sublayers(), {}
    context = Context()
    if N and M:
        context = Context(None, stack(embedded["s"], sublayers[: 2 * N], model.source_ends, context, s, a))
        sublayers, source = sublayers[2 * N :], {"source_BS": SOURCE}
    torch.testing.assert_close(
        model.features(TOKENS, **source), stack(embedded["x"], sublayers, model.ends, context, s, a)
    )


def test_s_changes_no_output_but_by_eps() -> None:
    one, small = (shaken(M=3, eps=0.0, scheme_options={"s": s}) for s in (1.0, 1e-3))
    torch.testing.assert_close(one(TOKENS), small(TOKENS))
    wide = shaken(M=3, eps=0.1, scheme_options={"s": 1e-3})
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
