"""CogView's norm: LayerNorm but for eps, and finite in fp16 where squares are not."""

import pytest
import torch

from tests.norms.made import denormals, made

X = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 6.0)[:, None]
GIVEN = torch.randn(1, 8, generator=torch.Generator().manual_seed(1))  # a gradient of the output


@pytest.mark.parametrize("over", ["tensor", "token"])
def test_it_is_layernorm_where_eps_is_nothing(over: str) -> None:
    torch.testing.assert_close(made("cogview", eps=0.0, over=over)(X), made("layernorm", eps=0.0)(X))


@pytest.mark.parametrize("over", ["tensor", "token"])
def test_eps_stands_against_the_largest_value(over: str) -> None:
    largest = X.abs().max() if over == "tensor" else X.abs().amax(-1, keepdim=True)
    centred = X - X.mean(-1, keepdim=True)
    want = centred / (centred.square().mean(-1, keepdim=True) + 0.5 * (largest / 8) ** 2).sqrt()
    norm = made("cogview", eps=0.5, over=over)
    torch.testing.assert_close(norm(X), want)
    torch.testing.assert_close(norm(1e6 * X), norm(X))  # so that the scale of the input is nothing at all
    changed = X.clone()
    changed[-1] *= 100  # felt by other tokens, through the one maximum
    assert torch.allclose(norm(changed)[:-1], norm(X)[:-1]) is (over == "token")


@pytest.mark.parametrize("over", ["tensor", "token"])
def test_of_no_rows_there_is_no_maximum(over: str) -> None:
    assert made("cogview", over=over)(torch.zeros(0, 8)).shape == (0, 8)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("over", ["tensor", "token"])
def test_zeros_stay_zeros_and_have_layernorms_gradient(over: str, flush: bool) -> None:
    x, y = (torch.zeros(1, 8, requires_grad=True) for _ in range(2))
    with denormals(flush):
        found = made("cogview", over=over)(x)
        found.backward(GIVEN)
    made("layernorm")(y).backward(GIVEN)
    assert torch.equal(found, torch.zeros(1, 8))
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("flush", [False, True])
def test_a_row_of_zeros_among_others_is_as_by_itself(flush: bool) -> None:
    x = torch.cat([X.float(), torch.zeros(1, 8)]).requires_grad_()
    with denormals(flush):
        made("cogview", over="token")(x).backward(GIVEN.expand(6, 8))
    y = torch.zeros(1, 8, requires_grad=True)
    made("layernorm")(y).backward(GIVEN)
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad[-1:], y.grad)
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("over", ["tensor", "token"])
def test_a_row_whose_eighth_is_no_normal_number_is_finite_where_they_are_flushed(over: str) -> None:
    x = torch.full((2, 8), 2 * torch.finfo(torch.float32).tiny).requires_grad_()
    with denormals(True):
        y = made("cogview", over=over)(x)
        y.sum().backward()
    assert x.grad is not None
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()
