"""The eager definitions of the operations: gradients in fp64, values against plain formulas, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.errors import BadInput
from normscale.ops.add_norm import add_norm
from normscale.ops.handles import Handle, residual_norm_handle
from normscale.ops.norm import norm
from normscale.ops.residual_norm import residual_norm
from normscale.ops.spec import NormSpec
from normscale.ops.statistics import Statistics, statistics

SPECS = [NormSpec("layernorm", 1e-5), NormSpec("rmsnorm", 1e-5), NormSpec("rmsnorm", 1e-6, zero_centred=True)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def plain(z: Tensor, gamma: Tensor | None, bias: Tensor | None, spec: NormSpec) -> Tensor:
    """The norm, written out."""
    z = z.double()
    if spec.kind == "layernorm":
        z = z - z.mean(-1, keepdim=True)
    y = z / (z.square().mean(-1, keepdim=True) + spec.eps).sqrt()
    if gamma is not None:
        y = y * (gamma.double() + (1 if spec.zero_centred else 0))
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("affine", [True, False])
def test_gradients_in_fp64(spec: NormSpec, affine: bool) -> None:
    x, residual = numbers(2, 3, 7), numbers(2, 3, 7, seed=1)
    gamma, bias = (numbers(7, seed=2), numbers(7, seed=3)) if affine else (None, None)
    seed = torch.tensor(9)
    weights = [w for w in (gamma, bias) if w is not None]

    def of(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: call(*given) if affine else call(*given, None, None)

    assert torch.autograd.gradcheck(of(lambda x, g, b: norm(x, g, b, spec)), (x, *weights))
    assert torch.autograd.gradcheck(of(lambda r, x, g, b: add_norm(r, x, g, b, spec)), (residual, x, *weights))
    for alpha in (numbers(seed=4), numbers(7, seed=4)):
        assert torch.autograd.gradcheck(
            of(lambda r, x, a, g, b: residual_norm(r, x, a, g, b, spec, dropout=0.3, seed=seed)),
            (residual, x, alpha, *weights),
        )


@pytest.mark.parametrize("spec", SPECS)
def test_values_are_the_formulas(spec: NormSpec) -> None:
    x, residual, gamma, bias = (t.detach().float() for t in (numbers(5, 17), numbers(5, 17), numbers(17), numbers(17)))
    alpha = torch.tensor(2.5)
    close = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(norm(x, gamma, bias, spec), plain(x, gamma, bias, spec), **close)
    z, y = add_norm(residual, x, gamma, bias, spec)
    torch.testing.assert_close(z, residual + x)
    torch.testing.assert_close(y, plain(residual + x, gamma, bias, spec), **close)
    torch.testing.assert_close(
        residual_norm(residual, x, alpha, gamma, bias, spec), plain(2.5 * residual + x, gamma, bias, spec), **close
    )


def test_results_have_the_wider_dtype_and_only_add_norm_rounds_the_sum() -> None:
    # mean 300 in bf16: a rounded sum has steps of 2
    x, residual = (torch.randn(8, 64).bfloat16() for _ in range(2))
    residual = residual + 300
    spec, gamma = SPECS[0], torch.ones(64)
    y = residual_norm(residual, x, torch.tensor(1.0), gamma, None, spec)
    exact = plain(residual.double() + x.double(), gamma, None, spec)
    assert y.dtype is torch.bfloat16
    assert float((y.double() - exact).norm() / exact.norm()) < 2e-3
    z, y = add_norm(residual, x, gamma, None, spec)
    assert z.dtype is y.dtype is torch.bfloat16
    torch.testing.assert_close(y.double(), plain(z, gamma, None, spec), rtol=8e-3, atol=1e-3)
    assert add_norm(residual.float(), x, gamma, None, spec)[0].dtype is torch.float32
    assert residual_norm(residual, x.half(), torch.tensor(1.0), gamma, None, spec).dtype is torch.float32


def test_the_one_of_a_zero_centred_gain_is_added_in_fp32() -> None:
    x, gamma = torch.randn(4, 32), torch.full((32,), 2.0**-9, dtype=torch.bfloat16)
    spec = NormSpec("rmsnorm", 1e-6, zero_centred=True)
    ratio = norm(x, gamma, None, spec) / norm(x, torch.zeros(32), None, spec)
    torch.testing.assert_close(ratio, torch.full_like(ratio, 1 + 2.0**-9), rtol=1e-6, atol=0)


def test_statistics_are_those_of_sum_result_and_gradient() -> None:
    rows, grad_rows = torch.zeros(4, 3), torch.zeros(2, 3)
    to = Statistics(rows, torch.tensor([1]), torch.tensor([3]), grad_rows, torch.tensor([0]))
    x, residual = torch.randn(6, 9, requires_grad=True), torch.randn(6, 9)
    y = residual_norm(residual, x, torch.tensor(3.0), None, None, SPECS[0], statistics=to)
    y.square().sum().mul(0.5).backward()
    z = (3 * residual + x).detach().requires_grad_()
    (dz,) = torch.autograd.grad(norm(z, None, None, SPECS[0]).square().sum() / 2, z)
    torch.testing.assert_close(rows[1], statistics(z))
    torch.testing.assert_close(rows[3], statistics(y))
    torch.testing.assert_close(grad_rows[0], statistics(dz))
    assert not rows[[0, 2]].any()
    assert not grad_rows[1].any()


def test_what_does_not_fit_is_refused_by_name() -> None:
    x, w, spec = torch.randn(3, 8), torch.ones(8), SPECS[0]
    alpha, rows, row = torch.tensor(1.0), torch.zeros(4, 3), torch.tensor([1])
    handle, far = Handle(x, alpha), Statistics(rows.to("meta"))
    for message, call in (
        ("gamma has shape (7,)", lambda: norm(x, torch.ones(7), None, spec)),
        ("bias has shape (1, 8)", lambda: norm(x, w, w[None], spec)),
        ("residual has shape (8,)", lambda: add_norm(x[0], x, w, None, spec)),
        ("alpha has shape (3, 1)", lambda: residual_norm(x, x, torch.ones(3, 1), w, None, spec)),
        ("x has shape ()", lambda: norm(torch.tensor(1.0), None, None, spec)),
        ("x is torch.int64", lambda: norm(torch.ones(2, 8, dtype=torch.int64), None, None, spec)),
        ("gamma is on meta", lambda: norm(x, w.to("meta"), None, spec)),
        ("dropout=1.5", lambda: residual_norm(x, x, alpha, w, None, spec, dropout=1.5, seed=torch.tensor(1))),
        ("needs a seed", lambda: residual_norm(x, x, alpha, w, None, spec, dropout=0.5)),
        (
            "seed is on meta",
            lambda: residual_norm(x, x, alpha, w, None, spec, dropout=0.5, seed=torch.tensor(1, device="meta")),
        ),
        ("alpha is torch.int64", lambda: residual_norm(x, x, torch.tensor(2), w, None, spec)),
        ("next_alpha is torch.int64", lambda: residual_norm_handle(x, handle, x, torch.tensor(2), w, None, spec)),
        ("next_alpha has shape (1,)", lambda: residual_norm_handle(x, handle, x, torch.ones(1), w, None, spec)),
        ("next_alpha is on meta", lambda: residual_norm_handle(x, handle, x, alpha.to("meta"), w, None, spec)),
        ("rows has torch.float64", lambda: Statistics(rows.double())),
        ("rows has torch.float32, shape (4, 3), strides (1, 4)", lambda: Statistics(torch.zeros(3, 4).T)),
        ("grad_rows has torch.float32, shape (4, 2)", lambda: Statistics(rows, grad_rows=torch.zeros(4, 2))),
        ("grad_rows is on meta", lambda: Statistics(rows, grad_rows=rows.to("meta"))),
        ("z has torch.int32, shape (1,)", lambda: Statistics(rows, row.int())),
        ("y has torch.int64, shape ()", lambda: Statistics(rows, row, row[0])),
        ("dz is on meta", lambda: Statistics(rows, dz=row.to("meta"))),
        ("norm: rows of the statistics are on meta", lambda: norm(x, w, None, spec, statistics=far)),
        ("add_norm: rows of the", lambda: add_norm(x, x, w, None, spec, statistics=far)),
        ("residual_norm: rows of the", lambda: residual_norm(x, x, alpha, w, None, spec, statistics=far)),
        (
            "residual_norm: rows of the",
            lambda: residual_norm_handle(x, handle, x, alpha, w, None, spec, statistics=far),
        ),
        ("eps=-1e-05", lambda: NormSpec("layernorm", -1e-5)),
        ("eps=nan", lambda: NormSpec("layernorm", float("nan"))),
        ("eps=1e-40", lambda: NormSpec("layernorm", 1e-40)),
        ("kind 'batchnorm'", lambda: NormSpec("batchnorm", 1e-5)),  # type: ignore[arg-type]
    ):
        with pytest.raises(BadInput) as caught:
            call()
        assert message in str(caught.value), str(caught.value)
