"""The kernels as operations of PyTorch, opaque to the compiler, with shapes for tracing; see `ops.fused` for gradients.

Three operations serve the public ones: `normscale::norm_forward`, `norm_backward` and `write_partials`. CUDA tensors
go to the kernels; CPU tensors to `ops.formulas`, or to the kernels where Triton interprets them. A graph sees one node
a pass, so that what the compiler does with a user kernel's scalars cannot reach ours.

The gradient of a trained alpha above width 4096 (`tiling.WIDEST_ALPHA`) is summed in PyTorch instead of the kernel.
No result shares memory with an argument.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from normscale.ops import formulas
from normscale.ops.backends import INTERPRETED
from normscale.ops.launch import (
    Gradients,
    Inputs,
    Wanted,
    as_rows,
    backward_calls,
    backward_plan,
    forward_call,
    forward_demand,
    reduce_call,
)
from normscale.ops.spec import Kind, NormSpec
from normscale.ops.tiling import forward_tiling

_LIBRARY = torch.library.Library("normscale", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "norm_forward(Tensor x, Tensor? residual, Tensor? alpha, Tensor? gamma, Tensor? bias, Tensor? seed, "
    "Tensor eps, float dropout, str kind, bool zero_centred, bool store_z, bool measure_z, bool measure_y) "
    "-> (Tensor y, Tensor z, Tensor moments, Tensor z_partials, Tensor y_partials)"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "norm_backward(Tensor dy, Tensor? dhandle, Tensor? next_alpha, Tensor? dz, Tensor x, Tensor? residual, "
    "Tensor? alpha, Tensor? gamma, Tensor? seed, Tensor moments, float dropout, str kind, "
    "bool zero_centred, ScalarType? dx_dtype, ScalarType? dresidual_dtype, bool scale_residual, bool want_dgamma, "
    "bool want_dbias, bool want_dalpha, bool measure_dz) "
    "-> (Tensor dx, Tensor dresidual, Tensor dgamma, Tensor dbias, Tensor dalpha, Tensor dz_partials)"
)
_LIBRARY.define("write_partials(Tensor partials, Tensor(a!) rows, Tensor index) -> ()")  # type: ignore[no-untyped-call]


def _work(*tensors: Tensor | None) -> torch.dtype:
    """Returns fp32, or fp64 where a tensor has it (which only the CPU formulas take)."""
    wide = any(x is not None and x.dtype is torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


def _wider(x: Tensor, residual: Tensor | None) -> torch.dtype:
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def _shapes_forward(
    x: Tensor,
    residual: Tensor | None,
    alpha: Tensor | None,
    gamma: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: Tensor,
    dropout: float,
    kind: Kind,
    zero_centred: bool,
    store_z: bool,
    measure_z: bool,
    measure_y: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the results of a forward pass, allocated."""
    n_rows, width = prod(x.shape[:-1]), x.shape[-1]
    dtype = _wider(x, residual)
    programs = 0
    if measure_z or measure_y:  # only then: a minimum over a symbolic number of rows would make a graph for a range
        demand = forward_demand(x, residual, alpha, kind, store_z, measured=True)
        programs = forward_tiling(n_rows, width, x.device, demand).programs
    y = x.new_empty(x.shape, dtype=dtype)
    z = x.new_empty(x.shape if store_z else (0,), dtype=dtype)
    moments = x.new_empty((3 if kind == "layernorm" else 1, n_rows), dtype=_work(x, residual))
    z_partials = x.new_empty((programs if measure_z else 0, 4), dtype=torch.float32)
    y_partials = x.new_empty((programs if measure_y else 0, 4), dtype=torch.float32)
    return y, z, moments, z_partials, y_partials


def _forward(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    alpha, gamma, bias, seed, eps, dropout, kind, zero_centred, store_z, measure_z, measure_y = rest
    results = y, z, moments, z_partials, y_partials = _shapes_forward(x, residual, *rest)
    if y.numel() == 0:
        return results
    arguments = (
        Inputs(
            as_rows(x),
            None if residual is None else as_rows(residual),
            _dense(alpha),
            _dense(gamma),
            seed,
            dropout,
            NormSpec(kind, float(eps), zero_centred),
        ),
        _dense(bias),
        as_rows(y),
        as_rows(z) if store_z else None,
        moments,
        z_partials if measure_z else None,
        y_partials if measure_y else None,
    )
    if x.is_cpu and not INTERPRETED:
        formulas.forward(*arguments)
    else:
        forward_call(*arguments).launch()
    return results


def _shapes_backward(
    dy: Tensor,
    dhandle: Tensor | None,
    next_alpha: Tensor | None,
    dz: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    alpha: Tensor | None,
    gamma: Tensor | None,
    seed: Tensor | None,
    moments: Tensor,
    dropout: float,
    kind: Kind,
    zero_centred: bool,
    dx_dtype: torch.dtype | None,
    dresidual_dtype: torch.dtype | None,
    scale_residual: bool,
    want_dgamma: bool,
    want_dbias: bool,
    want_dalpha: bool,
    measure_dz: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the results of a backward pass, allocated; an empty one is not wanted."""
    programs = 0
    if measure_dz:  # as in the forward pass
        inputs = Inputs(x, residual, alpha, gamma, seed, dropout, NormSpec(kind, 0.0, zero_centred))
        gradients, affine = Gradients(dy, dhandle, next_alpha, dz), want_dgamma or want_dbias
        programs = backward_plan(
            inputs, gradients, measured=True, want_affine=affine, want_alpha=want_dalpha
        ).tiling.programs
    return _empty_backward(
        x, moments, dx_dtype, dresidual_dtype, want_dgamma, want_dbias, want_dalpha, measure_dz, programs
    )


def _empty_backward(
    x: Tensor,
    moments: Tensor,
    dx_dtype: torch.dtype | None,
    dresidual_dtype: torch.dtype | None,
    want_dgamma: bool,
    want_dbias: bool,
    want_dalpha: bool,
    measure_dz: bool,
    programs: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the results of `_shapes_backward`, of so many programs."""
    width = x.shape[-1]
    return (
        x.new_empty(x.shape if dx_dtype else (0,), dtype=dx_dtype or x.dtype),
        x.new_empty(x.shape if dresidual_dtype else (0,), dtype=dresidual_dtype or x.dtype),
        x.new_empty((width if want_dgamma else 0,), dtype=moments.dtype),
        x.new_empty((width if want_dbias else 0,), dtype=moments.dtype),
        x.new_empty((width if want_dalpha else 0,), dtype=moments.dtype),
        x.new_empty((programs if measure_dz else 0, 4), dtype=torch.float32),
    )


def _backward(*given: Any) -> tuple[Tensor, ...]:
    dy, dhandle, next_alpha, dz, x, residual, alpha, gamma, seed, moments, dropout, kind, zero_centred = given[:13]
    dx_dtype, dresidual_dtype, scale_residual, want_dgamma, want_dbias, want_dalpha, measure_dz = given[13:]
    inputs = Inputs(
        as_rows(x),
        None if residual is None else as_rows(residual),
        _dense(alpha),
        _dense(gamma),
        seed,
        dropout,
        NormSpec(kind, 0.0, zero_centred),  # eps is in the moments
    )
    gradients = Gradients(
        as_rows(dy),
        None if dhandle is None else as_rows(dhandle),
        _dense(next_alpha),
        None if dz is None else as_rows(dz),
    )
    plan = backward_plan(
        inputs, gradients, measured=measure_dz, want_affine=want_dgamma or want_dbias, want_alpha=want_dalpha
    )
    results = dx, dresidual, dgamma, dbias, dalpha, dz_partials = _empty_backward(
        x,
        moments,
        dx_dtype,
        dresidual_dtype,
        want_dgamma,
        want_dbias,
        want_dalpha,
        measure_dz,
        plan.tiling.programs,
    )
    if x.numel() == 0:
        for total in (dgamma, dbias, dalpha):
            total.zero_()
        return results
    partials = [
        x.new_empty((plan.partial_rows, x.shape[-1]), dtype=moments.dtype) if want else None
        for want in (want_dgamma, want_dbias, want_dalpha and not plan.apart)
    ]
    wanted = Wanted(
        as_rows(dx) if dx_dtype else None,
        as_rows(dresidual) if dresidual_dtype else None,
        dgamma=partials[0],
        dbias=partials[1],
        dalpha=partials[2],
        dz_partials=dz_partials if measure_dz else None,
        scale_residual=scale_residual,
    )
    if x.is_cpu and not INTERPRETED:
        formulas.backward(inputs, gradients, moments, wanted)
    else:
        if plan.folded and gradients.dhandle is not None:
            both = torch.addcmul(gradients.dy.float(), gradients.dhandle.float(), next_alpha.float())
            gradients = Gradients(both, dz=gradients.dz)
        for call in backward_calls(inputs, gradients, moments, wanted, plan):
            call.launch()
        if plan.scaled_after and scale_residual and dresidual_dtype:
            dresidual.mul_(alpha)
    if plan.apart:
        partials[2] = x.new_empty((1, x.shape[-1]), dtype=moments.dtype)
        formulas.backward(inputs, gradients, moments, Wanted(dalpha=partials[2]))
    for total, partial in zip((dgamma, dbias, dalpha), partials, strict=True):
        if partial is not None:
            torch.sum(partial, dim=0, out=total)
    return results


def _dense(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


def _write_partials(partials: Tensor, rows: Tensor, index: Tensor) -> None:
    if partials.is_cpu and not INTERPRETED:
        row = partials.sum(0)[:3]
        row[1] = partials[:, 1].amax() if partials.shape[0] else 0.0
        row[:2] = torch.where(partials[:, 3].sum() > 0, torch.nan, row[:2])
        rows.index_copy_(0, index, row.unsqueeze(0))
    else:
        reduce_call(partials, rows, index).launch()


for _name, _run in (("norm_forward", _forward), ("norm_backward", _backward), ("write_partials", _write_partials)):
    _LIBRARY.impl(_name, _run, "CPU")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _run, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("normscale::norm_forward", _shapes_forward)
torch.library.register_fake("normscale::norm_backward", _shapes_backward)
torch.library.register_fake("normscale::write_partials", lambda partials, rows, index: None)
