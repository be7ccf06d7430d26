"""The residual-handle protocol through a whole model: a stand-in for the fused operation, in fp64, against eager.

The stand-in keeps the protocol of `ops.handles` to the letter (one gradient dz for both inputs, not yet
multiplied by alpha), so that what is tested is who hands which alpha to whom. The kernels have tests of their own.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.models.stack import Transformer
from normscale.norms import norm as norms
from normscale.norms import set_backend
from normscale.ops import handles
from normscale.ops.handles import Handle
from normscale.ops.statistics import Statistics, write_row
from normscale.schemes import Depth, registry
from normscale.schemes.post import PostNorm
from tests.schemes.test_contract import empty

SIZE = {"d": 16, "heads": 2, "context": 8}
TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
SOURCE = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(1))
TOPOLOGIES = {"decoder": {"M": 3}, "encoder": {"N": 3, "M": 0}, "both": {"N": 2, "M": 3}}


class Protocol(torch.autograd.Function):
    """y and its handle, of a handle and a branch; LayerNorm without weights."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        residual: Tensor,
        x: Tensor,
        alpha: Tensor,
        next_alpha: Tensor,
        statistics: Statistics | None,
    ) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            z = (alpha * residual + x.detach()).requires_grad_()
            y = torch.nn.functional.layer_norm(z, z.shape[-1:])
        ctx.z, ctx.y, ctx.next_alpha, ctx.statistics = z, y, next_alpha, statistics
        if statistics is not None:
            statistics.write(z, y)
        ctx.set_materialize_grads(False)
        return y.detach().clone(), torch.full_like(y, torch.nan)  # its values are nobody's business

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, dh = grads
        total = sum(g for g in (dy, None if dh is None else ctx.next_alpha * dh) if g is not None)
        (dz,) = torch.autograd.grad(ctx.y, ctx.z, total)
        if ctx.statistics is not None and ctx.statistics.grad_rows is not None:
            write_row(ctx.statistics.grad_rows, ctx.statistics.dz, dz)
        return dz, None, dz, None, None, None


def stand_in(
    residual: Tensor, handle: Any, x: Tensor, next_alpha: Tensor, *rest: Any, statistics: Statistics | None = None
) -> Any:
    y, token = Protocol.apply(handle.token, residual.detach(), x, handle.alpha, next_alpha, statistics)
    return y, Handle(token, next_alpha)


@pytest.fixture
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (norms, handles):
        monkeypatch.setattr(module, "choose", lambda *of: "triton")
    monkeypatch.setattr(norms, "residual_norm_handle", stand_in)


class Rising(PostNorm):
    """Another alpha at every site: what a site must not take is the alpha of its neighbour."""

    def alpha(self, depth: Depth, site: Any) -> float:
        return 1.0 + site.index / 3


def model_of(backend: Any, scheme: str, topology: str, **options: Any) -> Transformer:
    bare = {"norm_options": {"gain": False, "bias": False}}
    model = build(ModelConfig(**SIZE | TOPOLOGIES[topology] | bare | {"scheme": scheme} | options), 32, 0).double()
    for buffer in (b for name, b in model.named_buffers() if name.endswith("alpha")):
        assert buffer.dtype is torch.float64
    set_backend(model, backend)
    return model


def beside(topology: str) -> dict[str, Tensor]:
    return {"source_BS": SOURCE} if topology == "both" else {}


@pytest.mark.usefixtures("_fused")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("scheme", ["post", "deepnorm", "rising"])
def test_gradients_through_handles_are_those_without(
    scheme: str, topology: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.SCHEMES.classes, "rising", Rising)
    eager, fused = (model_of(b, scheme, topology, checkpointing=checkpointing) for b in ("eager", "triton"))
    filled = [empty(m) for m in (eager, fused)]
    losses = [m(TOKENS, to, **beside(topology)).square().mean() for m, to in zip((eager, fused), filled, strict=True)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    for loss in losses:
        loss.backward()
    for field, want in filled[0]._asdict().items():  # gradients of streams and of z too
        bound = 0.0 if field == "grad_rows" else 1e-5
        torch.testing.assert_close(getattr(filled[1], field), want, rtol=1e-5, atol=bound, msg=field)
    assert (filled[0].grad_rows[1 :: eager.rows_per_site, 0] > 0).all()
    for (name, a), b in zip(eager.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-14, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.usefixtures("_fused")
def test_a_block_that_is_left_out_takes_its_alpha_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.SCHEMES.classes, "rising", Rising)
    eager, fused = (model_of(backend, "rising", "decoder") for backend in ("eager", "triton"))
    monkeypatch.setattr(norms, "residual_norm", plain)
    for skip in range(3):
        for model in (eager, fused):
            model.zero_grad()
            model(TOKENS, skip=skip).square().mean().backward()
        for a, b in zip(eager.parameters(), fused.parameters(), strict=True):
            assert (a.grad is None) is (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-14)


def plain(residual: Tensor, x: Tensor, alpha: Tensor, *rest: Any, **named: Any) -> Tensor:
    return torch.nn.functional.layer_norm(alpha * residual + x, x.shape[-1:])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_site_after_a_site_is_the_next_of_its_side(topology: str) -> None:
    depth = Depth(TOPOLOGIES[topology].get("N", 0), TOPOLOGIES[topology]["M"])
    sites = depth.sites()
    for site, after in zip(sites, [*sites[1:], None], strict=True):
        assert depth.after(site) == (after if after is not None and after.side == site.side else None)
    for side in {site.side for site in sites}:
        assert depth.first(side) == next(site for site in sites if site.side == side)


@pytest.mark.usefixtures("_fused")
def test_handles_cost_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph serves the first block and the last, as without handles; nothing breaks it."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: real(f, backend="eager", fullgraph=True))
    monkeypatch.setattr(norms, "residual_norm_handle", traceable)
    eager = model_of("eager", "deepnorm", "decoder")
    compiled = build(ModelConfig(**SIZE, M=12, scheme="deepnorm", backend="triton", compile=True), 32, 0)
    counters.clear()
    assert compiled(TOKENS).shape == eager(TOKENS).shape
    assert counters["stats"]["unique_graphs"] == compiled.structures == 1
    filled = empty(compiled)
    compiled(TOKENS, filled).sum().backward()
    assert counters["stats"]["unique_graphs"] == 2
    assert (filled.rows[:, 0] > 0).all()


def traceable(
    residual: Tensor, handle: Any, x: Tensor, next_alpha: Tensor, *rest: Any, statistics: Statistics | None = None
) -> Any:
    y = plain(residual, x, handle.alpha)
    if statistics is not None:
        statistics.write(y, y)
    return y, Handle((y + handle.token).sum().expand(y.shape), next_alpha)  # one number, as the real one
