"""Admin's closed forms: constants, equivalence with Post-Norm, and how the output's change grows with depth."""

from functools import cache
from math import log, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from normscale.schemes import Depth, Role
from normscale.schemes.admin_torch import AdminTorch
from tests.schemes.test_theory import model_of
from tests.schemes.written import FORMS, SOURCE, TOKENS, branch, compare, ln, made

# Sublayers of a stack: omega where the change is to grow as log n, and as 1; from calculate_init.
OMEGA = {2: (1.31557, 1.41421), 12: (2.01701, 3.46410), 36: (3.04084, 6.0), 200: (6.07461, 14.14214)}
OMEGA |= {2000: (16.19385, 44.72136)}


@pytest.mark.parametrize("n", OMEGA)
def test_omega_follows_from_the_number_of_sublayers(n: int) -> None:
    for depth in (Depth(n // 2, 0), Depth(0, n // 2)):
        for site in (depth.sites()[0], depth.sites()[-1]):
            got = [AdminTorch(AdminTorch.Options(change=c)).alpha(depth, site) for c in ("log", "1", "n")]
            assert got == pytest.approx([*OMEGA[n], 1.0], abs=1e-4)
            assert AdminTorch().gain(depth, site, Role("ffn", "out")) == 1.0


@pytest.mark.parametrize(("N", "M"), [(6, 6), (12, 3), (1, 100)])
def test_two_stacks_count_their_own_sublayers(N: int, M: int) -> None:
    scheme, depth = AdminTorch(), Depth(N, M)
    for site in depth.sites():
        n = 2 * N if site.side == "encoder" else 3 * M
        assert scheme.alpha(depth, site) == pytest.approx(sqrt((n + 1) / log(n + 1) - 1))


def stack_of(change: str, trained: bool) -> Any:
    def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
        n = len(layers)  # of its own side
        constant = {"log": sqrt((n + 1) / log(n + 1) - 1), "1": sqrt(n)}[change]
        for layer in layers:
            omega = layer.own.alpha if trained else constant
            x = ln(omega * x + branch(layer, x, memory), layer.own.norm)
        return x

    return stack


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("change", ["log", "1"])
def test_the_stack_equals_its_formula(change: str, trained: bool, form: str) -> None:
    model = made("admin-torch", *FORMS[form], change=change, trained=trained)
    compare(model, stack_of(change, trained))
    assert all(layer.own.tensor("alpha").shape == ((16,) if trained else ()) for layer in model.sublayers())


def test_a_change_of_order_n_is_post_norm() -> None:
    post, admin = (made(name, 2, 3, **options) for name, options in (("post", {}), ("admin-torch", {"change": "n"})))
    assert torch.equal(post(TOKENS, source_BS=SOURCE), admin(TOKENS, source_BS=SOURCE))


@pytest.mark.parametrize("change", ["log", "1", "n"])
def test_a_trained_omega_starts_at_the_constant(change: str) -> None:
    constant, trained = (made("admin-torch", 2, 3, perturbed=False, change=change, trained=t) for t in (False, True))
    for one, other in zip(constant.sublayers(), trained.sublayers(), strict=True):
        assert torch.equal(other.own.alpha, one.own.tensor("alpha").expand(16))


def test_a_trained_omega_learns_and_a_constant_is_no_parameter() -> None:
    trained, constant = (made("admin-torch", 0, 2, trained=t) for t in (True, False))
    trained(TOKENS).square().mean().backward()
    assert all(sublayer.own.alpha.grad.abs().min() > 0 for sublayer in trained.sublayers())
    assert not any("alpha" in name for name, _ in constant.named_parameters())


DEPTHS = (4, 8, 16, 32)


@torch.no_grad()
def change_of(blocks: int, seed: int, **arm: Any) -> float:
    """The mean square of the output's change where every weight of a branch is changed at random a little."""
    model, generator = model_of(blocks, seed, **arm), torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (4, 8), generator=generator)
    before = model.features(tokens)
    for p in model.blocks.parameters():
        p.add_(1e-5 * p.std() * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return float((model.features(tokens) - before).square().mean())


@cache
def slope(change: str) -> float:
    arm = {"scheme": "admin-torch", "scheme_options": {"change": change}}
    lines = [[change_of(blocks, seed, **arm) for blocks in DEPTHS] for seed in (0, 1, 2)]
    return float(np.mean([np.polyfit(np.log(DEPTHS), np.log(line), 1)[0] for line in lines]))


def test_the_change_of_the_output_grows_as_each_form_says() -> None:
    assert slope("n") > 0.8
    assert slope("1") == pytest.approx(0.0, abs=0.25)
    assert slope("1") + 0.1 < slope("log") < slope("n") - 0.3
