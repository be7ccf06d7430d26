"""ScaleNorm: the length of what comes out."""

import pytest
import torch

from tests.norms.made import made

X = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("options", "length"), [({}, 8**0.5), ({"length": 3.0}, 3.0), ({"gain": False}, 8**0.5)])
def test_every_vector_has_the_same_length(options: dict[str, float], length: float) -> None:
    norm = made("scalenorm", eps=0.0, **options).double()
    torch.testing.assert_close(norm(X), length * X / X.norm(dim=-1, keepdim=True))
    assert len(list(norm.parameters())) == ("gain" not in options)


def test_the_length_is_trained_and_at_first_that_of_a_bare_rmsnorm() -> None:
    norm, bare = made("scalenorm", eps=0.1).double(), made("rmsnorm", eps=0.1, gain=False).double()
    torch.testing.assert_close(norm(X), bare(X))  # eps included
    norm(X).square().sum().backward()
    # d/dg sum |g u|^2 = 2 g sum |u|^2
    torch.testing.assert_close(norm.length.grad, (2 * bare(X).square().sum() / 8**0.5)[None])
