"""Dropout inside the kernel: the same elements forward, backward, on replay and with every backend."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from normscale.ops.residual_norm import residual_norm
from normscale.ops.spec import NormSpec
from tests.ops.compare import DEVICE, check, run
from tests.ops.inputs import problem
from tests.ops.oracle import kept_elements

KINDS = ("layernorm", "rmsnorm")
SEEDS = (0, 7, 2**31 + 5, 2**40 + 77, -3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [5, 48, 62, 1000, 9001])
def test_values_and_gradients_equal_fp64_with_an_independent_generator(width: int, kind: str) -> None:
    for dtype in (torch.float32, torch.float16):
        check(problem("residual_norm", kind, (3, width), dtype, dropout=0.3, seed=2**40 + 77))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_branch_and_its_gradient_lose_the_same_elements(seed: int) -> None:
    # RMSNorm of random numbers, without weights, makes no gradient exactly zero: the zeros of dx are what was dropped.
    one = problem("residual_norm", "rmsnorm", (3, 67), dropout=0.4, affine="")
    one.seed = seed
    kept = torch.from_numpy(kept_elements(seed & (2**64 - 1), (3, 67), 0.4))
    got, eager = run(one), run(one, "eager")
    assert torch.equal(got["dx"] != 0, kept)
    assert torch.equal(eager["dx"] != 0, kept)
    assert torch.equal(got["dresidual"] != 0, torch.ones(3, 67, dtype=torch.bool))


def test_one_seed_is_one_mask_and_another_is_another() -> None:
    one, same, other = (problem("residual_norm", shape=(3, 67), dropout=0.4) for _ in range(3))
    other.seed = 1
    first, second, third = run(one), run(same), run(other)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["dx"] == 0, third["dx"] == 0)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_kept(p: float) -> None:
    one = problem("residual_norm", "rmsnorm", (16, 1000), dropout=p, affine="")
    share = float((run(one)["dx"] != 0).float().mean())
    assert abs(share - (1 - p)) < 4 * (p * (1 - p) / 16000) ** 0.5


def test_no_dropout_is_bit_for_bit_none_and_all_of_it_leaves_the_residual() -> None:
    one = problem("residual_norm", shape=(3, 67))
    plain = run(one)
    spec = NormSpec("layernorm", 1e-5)
    given = {n: getattr(one, n).to(DEVICE) for n in ("residual", "x", "alpha", "gamma", "bias")}
    none = residual_norm(*given.values(), spec, dropout=0.0, seed=torch.tensor(3, device=DEVICE), backend="triton")
    assert torch.equal(none.cpu(), plain["y"])
    for p in (1.0, 1 - 2.0**-33):
        one.dropout = p
        got = run(one)
        assert got["dx"].abs().max() == 0
        alone = problem("norm", shape=(3, 67), x=1.7 * one.residual, gamma=one.gamma, bias=one.bias)  # type: ignore[operator]
        torch.testing.assert_close(got["y"], run(alone)["y"], rtol=1e-5, atol=1e-5)


def test_a_recomputed_forward_drops_the_same_elements() -> None:
    one = problem("residual_norm", shape=(4, 40))
    names = ("residual", "x", "alpha", "gamma", "bias")
    seed, spec = torch.tensor(11, device=DEVICE), NormSpec("layernorm", 1e-5)

    def once(*given: torch.Tensor) -> torch.Tensor:
        return residual_norm(*given, spec, dropout=0.25, seed=seed, backend="triton")

    grads = []
    for through in (once, lambda *given: checkpoint(once, *given, use_reentrant=False)):
        given = [getattr(one, n).to(DEVICE).clone().requires_grad_() for n in names]
        assert one.dy is not None
        grads.append(torch.autograd.grad(through(*given), given, one.dy.to(DEVICE)))
    for plain, replayed in zip(*grads, strict=True):
        assert torch.equal(plain, replayed)
