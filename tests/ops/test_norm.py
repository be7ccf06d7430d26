"""LayerNorm and RMSNorm against fp64, at the inputs that break careless ones."""

import pytest
import torch
from torch import Tensor

from normscale.ops.norm import layernorm, rmsnorm
from tests.ops.compare import distance

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDED = {torch.bfloat16: 1.9e-3, torch.float16: 2.4e-4}  # what rounding the result alone costs


def layernorm_fp64(x: Tensor, gamma: Tensor, bias: Tensor, eps: float) -> Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    return gamma.double() * centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() + bias.double()


def rmsnorm_fp64(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    x = x.double()
    return gamma.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def forms(eps: float) -> list[float | Tensor]:
    """The eager form takes a float, the compiled form a tensor; both must be the same function."""
    return [eps, torch.tensor(eps)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 17, 64, 129, 384])
@pytest.mark.parametrize("form", [0, 1])
def test_both_norms_equal_fp64(dtype: torch.dtype, width: int, form: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(5, width) + 1).to(dtype)  # a mean that is not zero shows a wrong variance
    gamma, bias, eps = torch.randn(width), torch.randn(width), 1e-5
    tolerance = 4 * torch.finfo(dtype).eps * 4
    torch.testing.assert_close(
        layernorm(x, gamma, bias, forms(eps)[form]).double(),
        layernorm_fp64(x, gamma, bias, eps),
        rtol=tolerance,
        atol=tolerance,
    )
    torch.testing.assert_close(
        rmsnorm(x, gamma, forms(eps)[form]).double(), rmsnorm_fp64(x, gamma, eps), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("form", [0, 1])
def test_half_precision_is_rounded_once_at_the_end(dtype: torch.dtype, kind: str, form: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(64, 384, generator=generator) + 1).to(dtype)
    gamma, bias = (torch.randn(384, generator=generator) for _ in range(2))
    eps = forms(1e-5)[form]
    if kind == "layernorm":
        y, want = layernorm(x, gamma, bias, eps), layernorm_fp64(x, gamma, bias, 1e-5)
    else:
        y, want = rmsnorm(x, gamma, eps), rmsnorm_fp64(x, gamma, 1e-5)
    assert y.dtype is dtype
    assert distance(y, want) <= ROUNDED[dtype]


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("form", [0, 1])
def test_fp64_is_computed_in_fp64(kind: str, form: int) -> None:
    eps = forms(float(torch.tensor(1e-5)))[form]  # the form of a tensor is in fp32
    x, gamma, bias = torch.randn(5, 64).double() + 1, torch.randn(64).double(), torch.randn(64).double()
    if kind == "layernorm":
        y, want = layernorm(x, gamma, bias, eps), layernorm_fp64(x, gamma, bias, float(eps))
    else:
        y, want = rmsnorm(x, gamma, eps), rmsnorm_fp64(x, gamma, float(eps))
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", [0, 1])
def test_gradients_equal_fp64(form: int) -> None:
    torch.manual_seed(0)
    x, gamma, bias = (torch.randn(*shape, requires_grad=True) for shape in ((3, 4, 24), (24,), (24,)))
    dy = torch.randn(3, 4, 24)
    for ours, oracle, inputs in (
        (layernorm(x, gamma, bias, forms(1e-5)[form]), layernorm_fp64(x, gamma, bias, 1e-5), (x, gamma, bias)),
        (rmsnorm(x, gamma, forms(1e-5)[form]), rmsnorm_fp64(x, gamma, 1e-5), (x, gamma)),
    ):
        got = torch.autograd.grad(ours, inputs, dy)
        want = torch.autograd.grad(oracle, inputs, dy.double())
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", [0, 1])
def test_eps_stands_inside_the_root(form: int) -> None:
    # Variance 1e-10 under eps 1e-5: about 0.003 inside the root, about 0.5 outside.
    x = torch.tensor([[1e-5, -1e-5]])
    y = layernorm(x, None, None, forms(1e-5)[form])
    torch.testing.assert_close(y, torch.tensor([[0.0031623, -0.0031623]]), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_constant_row_has_finite_gradients(form: int, value: float) -> None:
    x = torch.full((2, 10), value, requires_grad=True)
    for y in (layernorm(x, None, None, forms(1e-5)[form]), rmsnorm(x, None, forms(1e-5)[form])):
        (dx,) = torch.autograd.grad(y, x, torch.randn(2, 10))
        assert torch.isfinite(dx).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-5, 1e-8, 1e-12])
@pytest.mark.parametrize("form", [0, 1])
def test_a_constant_row_gives_the_bias_whatever_the_dtype(dtype: torch.dtype, eps: float, form: int) -> None:
    bias = torch.arange(10.0)
    for value in (0.0, 3.0):
        y = layernorm(torch.full((2, 10), value, dtype=dtype), torch.ones(10), bias, forms(eps)[form])
        torch.testing.assert_close(y, bias.to(dtype).expand(2, 10))


@pytest.mark.parametrize("form", [0, 1])
def test_squares_do_not_overflow_half_precision(form: int) -> None:
    x = torch.tensor([1000.0, -1000.0] * 64, dtype=torch.float16)
    torch.testing.assert_close(rmsnorm(x, None, forms(1e-5)[form]), x.sign())


@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_may_be_in_half_precision_too(dtype: torch.dtype, form: int) -> None:
    torch.manual_seed(0)
    x, gamma, bias = (torch.randn(*shape).to(dtype) for shape in ((5, 24), (24,), (24,)))
    tolerance = 4 * torch.finfo(dtype).eps
    for y, oracle in (
        (layernorm(x, gamma, bias, forms(1e-5)[form]), layernorm_fp64(x, gamma, bias, 1e-5)),
        (rmsnorm(x, gamma, forms(1e-5)[form]), rmsnorm_fp64(x, gamma, 1e-5)),
    ):
        assert y.dtype is dtype
        torch.testing.assert_close(y.double(), oracle, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize("width", [4, 64, 129])
@pytest.mark.parametrize("bad", [1e25, 3e38, torch.inf])
def test_a_row_that_overflows_is_zeros_or_nan_and_touches_no_other(form: int, width: int, bad: float) -> None:
    eps = forms(1e-5)[form]
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    x[1, 0] = bad
    sound = x[[0, 2]]
    y = rmsnorm(x, None, eps)  # 1 / sqrt(inf) is 0
    assert y[1, 0].isnan() if bad == torch.inf else y[1, 0] == 0
    assert not y[1, 1:].any()
    torch.testing.assert_close(y[[0, 2]], rmsnorm(sound, None, eps))
    y = layernorm(x, None, None, eps)
    assert y[1].isnan().all() or (bad != torch.inf and not y[1].any())
    torch.testing.assert_close(y[[0, 2]], layernorm(sound, None, None, eps))
