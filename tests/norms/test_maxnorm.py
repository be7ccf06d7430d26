"""The layer of an article that is called stable: it normalises nothing."""

import pytest
import torch

from tests.norms.made import denormals, made

X = torch.randn(4000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_it_is_the_formula(eps: float) -> None:
    largest = X.abs().amax(-1, keepdim=True)
    want = X * largest / (X.var(-1, correction=0, keepdim=True) + eps * largest**2).sqrt()
    torch.testing.assert_close(made("maxnorm", eps=eps)(X), want)


def test_its_output_is_as_large_as_its_input() -> None:
    norm = made("maxnorm", 512, eps=1e-5)
    x = torch.randn(200, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    deviations = [float(norm(scale * x).detach().std()) for scale in (1e-3, 1.0, 1e3)]
    assert deviations[1] == pytest.approx(float(x.abs().amax(-1).square().mean().sqrt()), rel=0.01)
    assert [deviation / deviations[1] for deviation in deviations] == pytest.approx([1e-3, 1.0, 1e3])
    assert float(made("layernorm", 512)(1e3 * x.float()).detach().std()) == pytest.approx(1.0, rel=0.01)


def test_nothing_is_centred_and_zeros_stay_zeros() -> None:
    assert made("maxnorm")(X + 3.0).mean() > 1.0
    assert torch.equal(made("maxnorm")(torch.zeros(2, 8)), torch.zeros(2, 8))


@pytest.mark.parametrize("flush", [False, True])
def test_the_gradient_of_zeros_is_that_of_the_root_of_eps(flush: bool) -> None:
    x, given = torch.zeros(2, 8, requires_grad=True), torch.full((2, 8), 1e-3)
    with denormals(flush):
        made("maxnorm", eps=1e-4)(x).backward(given)
    torch.testing.assert_close(x.grad, given / 1e-2)
