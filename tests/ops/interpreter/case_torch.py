"""The operations inside PyTorch: schema checks, compiled graphs, tracing without data, checkpointing, autocast."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from normscale.ops.add_norm import add_norm
from normscale.ops.norm import norm
from normscale.ops.residual_norm import residual_norm
from normscale.ops.spec import NormSpec
from normscale.ops.statistics import Statistics
from tests.ops.compare import DEVICE

LAYERNORM = NormSpec("layernorm", 1e-5)
CALLS: dict[str, Callable[..., Any]] = {
    "norm": lambda x, r, a, g, b, **more: norm(x, g, b, LAYERNORM, backend="triton", **more),
    "add_norm": lambda x, r, a, g, b, **more: add_norm(r, x, g, b, LAYERNORM, backend="triton", **more),
    "residual_norm": lambda x, r, a, g, b, **more: residual_norm(r, x, a, g, b, LAYERNORM, backend="triton", **more),
}
OPS = pytest.mark.parametrize("op", CALLS)


def tensors(rows: int = 4, width: int = 40, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(rows)
    x, residual = (torch.randn(rows, width).to(dtype) for _ in range(2))
    weights = [torch.tensor(1.5), 1 + 0.1 * torch.randn(width), torch.randn(width)]
    return [t.to(DEVICE).requires_grad_() for t in (x, residual, *weights)]


def gradients(call: Callable[..., Any], given: list[Tensor]) -> list[Tensor | None]:
    out = call(*given)
    loss = sum(
        (i + 1) * (o.float() * o.float().cos()).sum() for i, o in enumerate(out if isinstance(out, tuple) else [out])
    )
    return list(torch.autograd.grad(loss, given, allow_unused=True))


@pytest.mark.parametrize("stored", [False, True])
def test_the_registered_operations_pass_opcheck(stored: bool) -> None:
    from normscale.ops import registered  # noqa: F401

    x, residual, alpha, gamma, bias = (t.detach() for t in tensors())
    ops = torch.ops.normscale
    tests = ("test_schema", "test_faketensor")  # gradients are an autograd.Function's, checked by every other test
    forward = (
        x,
        residual,
        None if stored else alpha,
        gamma,
        bias,
        None,
        torch.tensor(1e-5),
        0.0,
        "layernorm",
        False,
        stored,
        True,
        True,
    )
    torch.library.opcheck(ops.norm_forward.default, forward, test_utils=tests)
    y, z, moments, *_ = ops.norm_forward(*forward)
    options = (0.0, "layernorm", False, torch.float32, None if stored else torch.float32, True, True, True)
    saved = (z, None, None) if stored else (x, residual, alpha)
    backward = (y, None, None, z if stored else None, *saved, gamma, None, moments, *options, not stored, True)
    torch.library.opcheck(ops.norm_backward.default, backward, test_utils=tests)
    partials = ops.norm_backward(*backward)[-1]
    rows, index = torch.zeros(3, 3, device=DEVICE), torch.tensor([1], device=DEVICE)
    torch.library.opcheck(ops.write_partials.default, (partials, rows, index), test_utils=tests)


@OPS
def test_one_graph_serves_every_number_of_rows(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a CPU by the formulas: so many rows take long to interpret, and the graph is the same.
    monkeypatch.setattr("normscale.ops.registered.INTERPRETED", False)
    torch.compiler.reset()
    graphs = 0

    def counting(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(CALLS[op], fullgraph=True, dynamic=True, backend=counting)
    for rows in (4, 400, 20_000):
        given = tensors(rows)
        for want, got in zip(gradients(CALLS[op], given), gradients(compiled, given), strict=True):
            assert want is None or torch.equal(got, want)  # type: ignore[arg-type]
    assert graphs == 1


@OPS
def test_compiled_gradients_are_the_eager_ones(op: str) -> None:
    torch.compiler.reset()
    rows, index = torch.zeros(3, 3, device=DEVICE), torch.tensor([1], device=DEVICE)

    def call(*given: Tensor) -> Any:
        out = CALLS[op](*given, statistics=Statistics(rows, index, None, rows, index + 1))
        return tuple(o * 2 for o in out) if isinstance(out, tuple) else out * 2

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    given = tensors(5)
    want, measured = gradients(call, given), rows.clone()
    rows.zero_()
    got = gradients(compiled, given)
    for a, b in zip(want, got, strict=True):
        assert a is None or torch.equal(b, a)  # type: ignore[arg-type]
    assert torch.equal(rows, measured)


@OPS
def test_checkpointing_changes_nothing(op: str) -> None:
    given = tensors(6)
    again = gradients(lambda *g: checkpoint(CALLS[op], *g, use_reentrant=False), given)
    for want, got in zip(gradients(CALLS[op], given), again, strict=True):
        assert want is None or torch.equal(got, want)  # type: ignore[arg-type]


@OPS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_leaves_dtypes_as_they_come(op: str, dtype: torch.dtype) -> None:
    # The stream stays in fp32 beside a branch in half precision, and a half-precision stream is not widened.
    x, residual, *weights = tensors(4, dtype=dtype)
    with torch.autocast(DEVICE, dtype=dtype):
        out = CALLS[op](x, residual, *weights)
        wide = CALLS[op](x.float(), residual.float(), *weights)
    assert all(o.dtype is dtype for o in (out if isinstance(out, tuple) else (out,)))
    assert all(o.dtype is torch.float32 for o in (wide if isinstance(wide, tuple) else (wide,)))


@OPS
def test_shapes_without_data(op: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        for device in ("cpu", "cuda") if DEVICE == "cuda" else ("cpu",):
            given = [torch.empty(t.shape, dtype=t.dtype, device=device, requires_grad=True) for t in tensors(8)]
            out = CALLS[op](*given)
            outs = out if isinstance(out, tuple) else (out,)
            assert all(o.shape == (8, 40) for o in outs)
            grads = torch.autograd.grad(outs, given, [torch.empty_like(o) for o in outs], allow_unused=True)
            assert all(g is None or g.shape == t.shape for g, t in zip(grads, given, strict=True))


@OPS
def test_no_gradient_is_asked_for(op: str) -> None:
    given = [t.detach() for t in tensors()]
    with torch.no_grad():
        out = CALLS[op](*given)
    assert not any(o.requires_grad for o in (out if isinstance(out, tuple) else (out,)))


@OPS
def test_a_gradient_of_a_gradient_is_refused(op: str) -> None:
    x, *rest = tensors()
    out = CALLS[op](x, *rest)
    first = out[1] if isinstance(out, tuple) else out
    (dx,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
