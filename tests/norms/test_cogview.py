"""CogView's norm: LayerNorm but for eps, and finite in fp16 where squares are not."""

import pytest
import torch

from tests.norms.made import made

X = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 6.0)[:, None]


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


def test_zeros_stay_zeros() -> None:
    for over in ("tensor", "token"):
        assert torch.equal(made("cogview", over=over)(torch.zeros(2, 8)), torch.zeros(2, 8))
