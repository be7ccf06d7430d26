"""pRMSNorm: which channels its statistic is of."""

import math

import pytest
import torch

from tests.norms.made import made

X = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("share", [0.0625, 0.25, 0.26, 1.0])
def test_the_statistic_is_that_of_the_first_channels(share: float) -> None:
    norm = made("prmsnorm", 24, eps=0.1, share=share).double()
    k = math.ceil(24 * share)
    torch.testing.assert_close(norm(X), X / (X[:, :k].square().mean(-1, keepdim=True) + 0.1).sqrt())
    changed = X.clone()
    changed[:, k:] *= 5
    torch.testing.assert_close(norm(changed)[:, :k], norm(X)[:, :k])


def test_all_channels_make_an_rmsnorm() -> None:
    torch.testing.assert_close(made("prmsnorm", 24, share=1.0).double()(X), made("rmsnorm", 24).double()(X))
