"""Handles beside dropout, a trained alpha and statistics; and what they keep in memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.ops.handles import open_handle, residual_norm_handle
from normscale.ops.residual_norm import residual_norm
from normscale.ops.spec import NormSpec
from normscale.ops.statistics import Statistics, statistics
from tests.ops.compare import DEVICE

SITES, SHAPE = 3, (5, 24)
SPECS = [NormSpec("layernorm", 1e-5), NormSpec("rmsnorm", 1e-5, True)]


def problem(alpha_shape: tuple[int, ...] = ()) -> dict[str, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    return {
        "start": [drawn(*SHAPE)],
        "x": [drawn(*SHAPE) for _ in range(SITES)],
        "alpha": [1.5 + i + drawn(*alpha_shape).abs() for i in range(SITES)],
        "gamma": [1 + 0.1 * drawn(SHAPE[-1]) for _ in range(SITES)],
        "bias": [0.1 * drawn(SHAPE[-1]) for _ in range(SITES)],
    }


def run(
    given: dict[str, list[Tensor]], fused: bool, spec: NormSpec, train_alpha: bool, dropout: float
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Returns results and gradients of a stack, its rows of statistics, and those of gradients."""
    leaves = {name: [t.clone().requires_grad_() for t in tensors] for name, tensors in given.items()}
    for alpha in leaves["alpha"][:1] if train_alpha else leaves["alpha"]:
        alpha.requires_grad_(False)  # that of the opening is a constant
    rows, grad_rows = (torch.zeros(2 * SITES, 3, device=DEVICE) for _ in range(2))
    y = leaves["start"][0]
    results = []
    alphas = [*leaves["alpha"], torch.ones((), device=DEVICE)]
    if fused:
        y, handle = open_handle(y, alphas[0])
    for i, (x, gamma, bias) in enumerate(zip(leaves["x"], leaves["gamma"], leaves["bias"], strict=True)):
        z_row, y_row = (torch.tensor([2 * i + k], device=DEVICE) for k in (0, 1))
        more: dict[str, Any] = {"dropout": dropout, "seed": torch.tensor(i, device=DEVICE)}
        more["statistics"] = Statistics(rows, z_row, y_row, grad_rows, z_row)
        if fused:
            y, handle = residual_norm_handle(y, handle, x, alphas[i + 1], gamma, bias, spec, **more)
        else:
            y = residual_norm(y, x, alphas[i], gamma, bias, spec, **more)
        results.append(y)
    total = sum(((1.0 + i) * result).sin().sum() for i, result in enumerate(results))
    wanted = [t for tensors in leaves.values() for t in tensors if t.requires_grad]
    assert isinstance(total, Tensor)
    return [*results, *torch.autograd.grad(total, wanted)], rows, grad_rows


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
@pytest.mark.parametrize("alpha_shape", [(), SHAPE[-1:]], ids=["one", "each"])
@pytest.mark.parametrize(("train_alpha", "dropout"), [(False, 0.4), (True, 0.0), (True, 0.4)])
def test_handles_change_no_number(
    spec: NormSpec, alpha_shape: tuple[int, ...], train_alpha: bool, dropout: float
) -> None:
    given = problem(alpha_shape)
    want, rows, grad_rows = run(given, False, spec, train_alpha, dropout)
    got, found, found_grads = run(given, True, spec, train_alpha, dropout)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()  # an alpha of one number sums many terms that cancel
    torch.testing.assert_close(found, rows, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_grads, grad_rows, rtol=1e-4, atol=1e-6)


def test_a_handles_memory_is_not_kept_until_the_backward_pass() -> None:
    given = problem()
    saved: list[Tensor] = []
    start, x = given["start"][0].requires_grad_(), given["x"][0].requires_grad_()
    y, handle = open_handle(start, given["alpha"][0])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y1, h1 = residual_norm_handle(y, handle, x, given["alpha"][1], given["gamma"][0], given["bias"][0], SPECS[0])
    places = {t.untyped_storage().data_ptr() for t in saved}
    assert not places & {h.token.untyped_storage().data_ptr() for h in (handle, h1)}
    assert sum(t.numel() == y1.numel() for t in saved) == 2  # x and the residual


@pytest.mark.parametrize("vector", [False, True])
def test_wide_rows_in_fp32_measure_dz_beside_a_handle(vector: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handle is folded into dy there, and what is left has other programs than a kernel with a vector has."""
    monkeypatch.setattr("normscale.ops.tiling.processors", lambda device: 2)
    rows, width = 5, 12_290  # more rows than two processors have programs of 32 warps
    torch.manual_seed(0)
    x, residual, dy = (torch.randn(rows, width, device=DEVICE) for _ in range(3))
    alpha, next_alpha = torch.tensor(1.5, device=DEVICE), torch.rand((width,) if vector else (), device=DEVICE)
    spec, found = NormSpec("rmsnorm", 1e-5), torch.zeros(3, 3, device=DEVICE)
    at = Statistics(torch.zeros_like(found), None, None, found, torch.tensor([1], device=DEVICE))
    leaves = [x.requires_grad_(), residual.requires_grad_()]
    y, handle = open_handle(residual, alpha)
    y, handle = residual_norm_handle(y, handle, x, next_alpha, None, None, spec, statistics=at)
    got = torch.autograd.grad([y, handle.token], leaves, [dy, dy])
    want = torch.autograd.grad(residual_norm(residual, x, alpha, None, None, spec), leaves, dy + next_alpha * dy)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], statistics(want[0]), rtol=1e-4, atol=0)
