"""DyT: a function of each value by itself."""

import torch

from tests.norms.made import made

X = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_it_is_the_formula() -> None:
    norm = made("dyt", alpha_tanh=0.7).double()
    with torch.no_grad():
        for i, p in enumerate(norm.parameters()):
            p.add_(0.1 * torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(i)))
    want = norm.gamma * torch.tanh(norm.alpha_tanh * X) + norm.bias
    torch.testing.assert_close(norm(X), want)
    assert float(made("dyt").alpha_tanh.detach()) == 0.5


def test_no_channel_sees_another_and_large_values_are_squashed() -> None:
    norm, changed = made("dyt").double(), X.clone()
    changed[:, 0] = 1e6
    assert torch.equal(norm(changed)[:, 1:], norm(X)[:, 1:])
    torch.testing.assert_close(norm(changed)[:, 0], torch.ones(5, dtype=torch.float64))
