"""Derf: a function of each value by itself."""

import math

import torch

from tests.norms.made import made

X = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_it_is_the_formula() -> None:
    norm = made("derf", alpha_erf=0.7, shift=-0.2).double()
    want = [[math.erf(0.7 * x - 0.2) for x in row] for row in X.tolist()]
    torch.testing.assert_close(norm(X), torch.tensor(want, dtype=torch.float64))
    start = made("derf")
    assert [float(p.detach()) for p in (start.alpha_erf, start.shift)] == [0.5, 0.0]


def test_no_channel_sees_another() -> None:
    norm, changed = made("derf").double(), X.clone()
    changed[:, 0] = 1e6
    assert torch.equal(norm(changed)[:, 1:], norm(X)[:, 1:])
