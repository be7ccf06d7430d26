"""The residual-handle protocol over a stack of sites: the gradients of the plain chain, in fp64 and on the kernels."""

import pytest
import torch
from torch import Tensor

from normscale.ops.handles import open_handle, residual_norm_handle
from normscale.ops.residual_norm import residual_norm
from normscale.ops.spec import NormSpec
from tests.ops.compare import DEVICE, ROUNDING, SUMMED, distance

SITES, WIDTH = 5, 48
KINDS = ("layernorm", "rmsnorm")


def weights(vector: bool, dtype: torch.dtype = torch.float32) -> dict[str, list[Tensor]]:
    torch.manual_seed(0)
    shape = (WIDTH,) if vector else ()
    return {
        "x": [torch.randn(6, WIDTH).to(dtype)],
        "w": [(torch.randn(WIDTH, WIDTH) / WIDTH**0.5).to(dtype) for _ in range(SITES)],
        "gamma": [1 + 0.2 * torch.randn(WIDTH) for _ in range(SITES)],
        "bias": [torch.randn(WIDTH) for _ in range(SITES)],
        "alpha": [1.5 + torch.rand(shape) for _ in range(SITES + 1)],
    }


def leaves(given: dict[str, list[Tensor]], double: bool) -> dict[str, list[Tensor]]:
    made = {n: [(t.double() if double else t.clone()).to(DEVICE) for t in ts] for n, ts in given.items()}
    for name in ("x", "w", "gamma", "bias"):
        for tensor in made[name]:
            tensor.requires_grad_()
    return made


def gradients(y: Tensor, given: dict[str, list[Tensor]]) -> list[Tensor]:
    loss = (y.double() * torch.arange(y.numel(), device=y.device).view_as(y).cos()).sum()
    return list(torch.autograd.grad(loss, [t for n in ("x", "w", "gamma", "bias") for t in given[n]]))


def chain(given: dict[str, list[Tensor]], kind: str, backend: str = "eager") -> Tensor:
    y = given["x"][0]
    for i in range(SITES):
        spec = NormSpec(kind, 1e-5)  # type: ignore[arg-type]
        affine = (given["gamma"][i], given["bias"][i] if kind == "layernorm" else 0 * given["bias"][i])
        y = residual_norm(y, torch.tanh(y @ given["w"][i]), given["alpha"][i], *affine, spec, backend=backend)
    return y


def handled(given: dict[str, list[Tensor]], kind: str) -> Tensor:
    y, handle = open_handle(given["x"][0], given["alpha"][0])
    for i in range(SITES):
        spec = NormSpec(kind, 1e-5)  # type: ignore[arg-type]
        affine = (given["gamma"][i], given["bias"][i] if kind == "layernorm" else 0 * given["bias"][i])
        branch = torch.tanh(y @ given["w"][i])
        y, handle = residual_norm_handle(y, handle, branch, given["alpha"][i + 1], *affine, spec)
    return y


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vector", [False, True])
def test_a_stack_with_handles_has_the_gradients_of_the_plain_one(vector: bool, kind: str) -> None:
    given = weights(vector)
    exact, plain, fused = (leaves(given, double) for double in (True, False, False))
    want = gradients(chain(exact, kind), exact)
    y = handled(fused, kind)
    assert distance(y.detach().cpu(), chain(exact, kind).detach().cpu()) < ROUNDING[torch.float32]
    without = gradients(chain(plain, kind, "triton"), plain)
    for name, a, b, c in zip(range(99), want, gradients(y, fused), without, strict=False):
        if a.norm() == 0:
            continue
        found, other = distance(b.cpu(), a.cpu()), distance(c.cpu(), a.cpu())
        # The same as without handles: through five products and norms 7e-7 of a weight's, which sums over rows.
        assert found < SUMMED[torch.float32], f"gradient {name}: {found:.1e} from fp64 ({other:.1e} without handles)"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_no_worse_than_without_handles(dtype: torch.dtype) -> None:
    given = weights(False, dtype)
    exact, plain, fused = (leaves(given, double) for double in (True, False, False))
    want = gradients(chain(exact, "layernorm"), exact)
    without, got = gradients(chain(plain, "layernorm", "triton"), plain), gradients(handled(fused, "layernorm"), fused)
    for a, b, c in zip(want, got, without, strict=True):
        assert distance(b.cpu(), a.cpu()) <= 1.01 * distance(c.cpu(), a.cpu()) + 1e-9  # seen: 1.005


def test_a_site_whose_result_goes_only_into_the_next_residual_and_one_whose_handle_is_dropped() -> None:
    given = weights(False)
    spec, results = NormSpec("layernorm", 1e-5), []
    for fused in (False, True):
        g = leaves(given, not fused)
        affine = (g["gamma"][0], g["bias"][0], spec)
        x, branch = g["x"][0], 0.5 * g["w"][0][:6]
        if fused:
            y, handle = open_handle(x, g["alpha"][0])
            y, handle = residual_norm_handle(y, handle, branch, g["alpha"][1], *affine)
            y, _ = residual_norm_handle(y.detach(), handle, branch.detach(), g["alpha"][2], *affine)
        else:
            y = residual_norm(x, branch, g["alpha"][0], *affine)
            y = residual_norm(y, branch.detach(), g["alpha"][1], *affine)
        loss = (y.double() * torch.arange(y.numel(), device=y.device).view_as(y).cos()).sum()
        results.append(torch.autograd.grad(loss, [x, g["w"][0], g["gamma"][0], g["bias"][0]]))
    for want, got in zip(*results, strict=True):
        assert distance(got.cpu(), want.cpu()) < SUMMED[torch.float32]
