"""AdaNorm: the gain is a function of the input, and has no gradient."""

import torch

from tests.norms.made import made

X = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def normalised(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 0.1).sqrt()


def test_it_is_the_formula() -> None:
    for options, scale, k in (({}, 1.0, 0.1), ({"scale": 2.0, "k": 0.3}, 2.0, 0.3)):
        y = normalised(X)
        torch.testing.assert_close(made("adanorm", eps=0.1, **options)(X), scale * (1 - k * y) * y)


def test_the_factor_has_no_gradient() -> None:
    x, dy = X.clone().requires_grad_(), torch.randn(5, 8, dtype=torch.float64)
    (got,) = torch.autograd.grad(made("adanorm", eps=0.1, k=0.3)(x), x, dy)
    y = normalised(x)
    (want,) = torch.autograd.grad((1 - 0.3 * y).detach() * y, x, dy, retain_graph=True)
    torch.testing.assert_close(got, want)
    (other,) = torch.autograd.grad((1 - 0.3 * y) * y, x, dy)
    assert (got - other).abs().max() > 0.01
