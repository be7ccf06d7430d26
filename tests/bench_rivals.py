"""Who `bench_kernels` measures: each operation of ours, PyTorch's own, and what other projects have of it.

A call takes (x, alpha, gamma, bias), or (residual, x, alpha, gamma, bias), and returns y or (z, y). A stack's call
takes (start, branches, alpha, gamma, bias) and returns every site's result.
"""

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normscale.ops.add_norm import add_norm
from normscale.ops.handles import open_handle, residual_norm_handle
from normscale.ops.norm import norm
from normscale.ops.residual_norm import residual_norm
from normscale.ops.spec import NormSpec
from normscale.ops.statistics import Statistics
from tests.bench_kernels import EPS, OURS, OURS_STATISTICS

Call = Callable[..., Any]


def rivals(op: str, without: Sequence[str] = ()) -> dict[str, Call]:
    """Returns what is installed and has `op`, by name, ours first."""
    eager = _eager(op)
    found: dict[str, Call] = {OURS: ours(op)}
    if op != "stack" and "statistics" not in without:
        found[OURS_STATISTICS] = ours(op, statistics=True)
    found["eager"] = eager
    found["torch.compile"] = torch.compile(eager, dynamic=False)
    for name, module, make in (
        ("liger", "liger_kernel", _liger),
        ("flash-attn", "flash_attn", _flash_attn),
        ("apex", "fused_layer_norm_cuda", _apex),
        ("quack", "quack", _quack),
    ):
        if name not in without and find_spec(module) is not None:
            try:
                call = make(op)
            except Exception as error:
                print(f"{name}: left out: {str(error).splitlines()[:1] or type(error).__name__}", flush=True)
                continue
            if call is not None:
                found[name] = call
    return {name: call for name, call in found.items() if name not in without}


def ours(op: str, statistics: bool = False, backend: str = "triton") -> Call:
    """Returns our operation; with statistics, it writes those of z, y and dz."""
    spec = NormSpec("rmsnorm" if op.endswith("rmsnorm") else "layernorm", EPS)
    rms = spec.kind == "rmsnorm"

    def watch(x: Tensor) -> Statistics | None:
        return _statistics(x.device) if statistics else None

    def plain(x: Tensor, alpha: Tensor, gamma: Tensor, bias: Tensor) -> Tensor:
        return norm(x, gamma, None if rms else bias, spec, backend=backend, statistics=watch(x))

    def added(residual: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, bias: Tensor) -> Any:
        return add_norm(residual, x, gamma, None if rms else bias, spec, backend=backend, statistics=watch(x))

    def deepnorm(residual: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, bias: Tensor) -> Tensor:
        return residual_norm(residual, x, alpha, gamma, bias, spec, backend=backend, statistics=watch(x))

    def stack(start: Tensor, branches: list[Tensor], alpha: Tensor, gamma: Tensor, bias: Tensor) -> list[Tensor]:
        results = []
        if backend == "eager":
            for x in branches:
                start = residual_norm(start, x, alpha, gamma, bias, spec)
                results.append(start)
            return results
        y, handle = open_handle(start, alpha)
        for x in branches:
            y, handle = residual_norm_handle(y, handle, x, alpha, gamma, bias, spec)
            results.append(y)
        return results

    return {"deepnorm": deepnorm, "stack": stack}.get(op, added if op.startswith("add_") else plain)


@functools.cache
def _statistics(device: torch.device) -> Statistics:
    """Returns a place for the statistics, made once: a model has its rows too."""
    z, y, dz = (torch.tensor([i], device=device) for i in range(3))
    return Statistics(torch.zeros(3, 3, device=device), z, y, torch.zeros(3, 3, device=device), dz)


def _eager(op: str) -> Call:
    """Returns what one writes with PyTorch, with its own fused norms; weights are cast as autocast would cast them."""

    def normed(z: Tensor, gamma: Tensor, bias: Tensor) -> Tensor:
        if op.endswith("rmsnorm"):
            return F.rms_norm(z, z.shape[-1:], gamma.to(z.dtype), EPS)
        return F.layer_norm(z, z.shape[-1:], gamma.to(z.dtype), bias.to(z.dtype), EPS)

    def plain(x: Tensor, alpha: Tensor, gamma: Tensor, bias: Tensor) -> Tensor:
        return normed(x, gamma, bias)

    def added(residual: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        z = residual + x
        return z, normed(z, gamma, bias)

    def deepnorm(residual: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, bias: Tensor) -> Tensor:
        return normed(torch.addcmul(x, residual, alpha.to(x.dtype)), gamma, bias)

    def stack(start: Tensor, branches: list[Tensor], alpha: Tensor, gamma: Tensor, bias: Tensor) -> list[Tensor]:
        y, results = start, []
        for x in branches:
            y = deepnorm(y, x, alpha, gamma, bias)
            results.append(y)
        return results

    return {"deepnorm": deepnorm, "stack": stack}.get(op, added if op.startswith("add_") else plain)


def _liger(op: str) -> Call | None:
    if op == "layernorm":
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return lambda x, alpha, gamma, bias: LigerLayerNormFunction.apply(x, gamma, bias, EPS)
    if op == "rmsnorm":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        # The fp32 mode, and no writing over dy, which is used again here.
        return lambda x, alpha, gamma, bias: LigerRMSNormFunction.apply(x, gamma, EPS, 0.0, "gemma", False)
    if op == "add_rmsnorm":
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        def added(residual: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            y, z = LigerFusedAddRMSNormFunction.apply(x, residual, gamma, EPS, 0.0, "gemma", False)
            return z, y

        return added
    return None


def _flash_attn(op: str) -> Call | None:
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    rms = op.endswith("rmsnorm")
    if op in ("layernorm", "rmsnorm"):
        return lambda x, alpha, gamma, bias: layer_norm_fn(x, gamma, None if rms else bias, eps=EPS, is_rms_norm=rms)
    if op.startswith("add_"):

        def added(residual: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            y, z = layer_norm_fn(
                x, gamma, None if rms else bias, residual=residual, eps=EPS, prenorm=True, is_rms_norm=rms
            )
            return z, y

        return added
    return None  # no multiplier of the residual


def _apex(op: str) -> Call | None:
    from apex.normalization import fused_layer_norm as apex

    if op == "layernorm":
        return lambda x, alpha, gamma, bias: apex.fused_layer_norm_affine(
            x, gamma.to(x.dtype), bias.to(x.dtype), x.shape[-1:], EPS
        )
    if op == "rmsnorm":
        return lambda x, alpha, gamma, bias: apex.fused_rms_norm_affine(x, gamma.to(x.dtype), x.shape[-1:], EPS)
    return None


def _quack(op: str) -> Call | None:
    if op == "rmsnorm":
        from quack import rmsnorm

        return lambda x, alpha, gamma, bias: rmsnorm(x, gamma, eps=EPS)
    if op == "add_rmsnorm":
        from quack import rmsnorm

        def added(residual: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            y, z = rmsnorm(x, gamma, residual=residual, eps=EPS, prenorm=True)
            return z, y

        return added
    return None
