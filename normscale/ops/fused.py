"""The kernels' operations with gradients: y = Norm(z), where z is x or alpha * residual + drop(x).

One autograd function serves the public operations. z may be kept (`add_norm`), or the gradient of the residual may go
to a token in its place (`ops.handles`). Gradients of a gradient are not defined.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normscale.ops import registered  # noqa: F401 (it registers the operations)
from normscale.ops.handles import token_of
from normscale.ops.spec import Kind, NormSpec
from normscale.ops.statistics import Statistics

_ops = torch.ops.normscale


class _Operands(NamedTuple):
    """The tensors of a call. With `token` it gets the residual's gradient, without the factor alpha."""

    x: Tensor
    residual: Tensor | None
    alpha: Tensor | None
    gamma: Tensor | None
    bias: Tensor | None
    seed: Tensor | None
    token: Tensor | None
    next_alpha: Tensor | None


class _Fused(torch.autograd.Function):
    """y; and z where `store_z`; or y and a new token where one is given."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        alpha: Tensor | None,
        gamma: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        token: Tensor | None,
        next_alpha: Tensor | None,
        eps: Tensor,
        dropout: float,
        kind: Kind,
        zero_centred: bool,
        store_z: bool,
        rows: Tensor | None,
        z_index: Tensor | None,
        y_index: Tensor | None,
        grad_rows: Tensor | None,
        dz_index: Tensor | None,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.norm = (float(dropout), kind, zero_centred)
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype, None if bias is None else bias.dtype
        ctx.scaled, ctx.handed_on = alpha is not None and token is None, token is not None
        ctx.grad_rows, ctx.dz_index = grad_rows, dz_index
        measured = rows is not None and z_index is not None, rows is not None and y_index is not None
        y, z, moments, z_partials, y_partials = _ops.norm_forward(
            x, residual, alpha, gamma, bias, seed, eps, *ctx.norm, store_z, *measured
        )
        for partials, index, wanted in zip((z_partials, y_partials), (z_index, y_index), measured, strict=True):
            if wanted:
                _ops.write_partials(partials, rows, index)
        if store_z:
            ctx.save_for_backward(z, None, None, gamma, next_alpha, seed, moments)
            return y, z
        ctx.save_for_backward(x, residual, alpha, gamma, next_alpha, seed, moments)
        return y if token is None else (y, token_of(y))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, second: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, residual, alpha, gamma, next_alpha, seed, moments = ctx.saved_tensors
        nothing = (None,) * 10
        if dy is None:
            if second is None:
                return (None,) * 8 + nothing
            dy = torch.zeros_like(second)
        dhandle, dz = (second, None) if ctx.handed_on else (None, second)
        need_x, need_residual, need_alpha, need_gamma, need_bias, _, need_token, _ = ctx.needs_input_grad[:8]
        need_second = need_token if ctx.handed_on else need_residual
        x_dtype, residual_dtype, bias_dtype = ctx.dtypes
        measured = ctx.grad_rows is not None and ctx.dz_index is not None
        # One gradient serves both inputs where none is scaled: half of what would be written.
        shared = need_x and need_second and not ctx.scaled and ctx.norm[0] == 0 and x_dtype is residual_dtype
        dx, dresidual, dgamma, dbias, dalpha, partials = _ops.norm_backward(
            dy,
            dhandle,
            None if dhandle is None else next_alpha,
            dz,
            x,
            residual,
            alpha,
            gamma,
            seed,
            moments,
            *ctx.norm,
            x_dtype if need_x else None,
            residual_dtype if need_second and not shared else None,
            ctx.scaled,
            need_gamma,
            need_bias,
            need_alpha,
            measured,
        )
        if measured:
            _ops.write_partials(partials, ctx.grad_rows, ctx.dz_index)
        if need_alpha and alpha.dim() == 0:
            dalpha = dalpha.sum()
        at_second = (dx if shared else dresidual) if need_second else None
        return (
            dx if need_x else None,
            None if ctx.handed_on else at_second,
            dalpha.to(alpha.dtype) if need_alpha else None,
            dgamma.to(gamma.dtype) if need_gamma else None,
            dbias.to(bias_dtype) if need_bias else None,
            None,
            at_second if ctx.handed_on else None,
            None,
            *nothing,
        )


def _apply(
    tensors: _Operands, spec: NormSpec, statistics: Statistics | None, dropout: float = 0.0, store_z: bool = False
) -> Any:
    where: tuple[Tensor | None, ...] = (None,) * 5
    if statistics is not None:
        where = (statistics.rows, statistics.z, statistics.y, statistics.grad_rows, statistics.dz)
    given: tuple[Tensor | None, ...] = tensors
    if torch.compiler.is_compiling():
        given, where = _distinct(given), _distinct(where)
    # Eager mode makes it anew: a tensor of before a FakeTensorMode does not go with those of within.
    eps = spec.eps_tensor if torch.compiler.is_compiling() else _on_host(spec.eps)
    constants = (eps, float(dropout), spec.kind, spec.zero_centred, store_z)
    return _Fused.apply(*given, *constants, *where)  # type: ignore[no-untyped-call]


def _on_host(eps: float) -> Tensor:
    return torch.tensor(eps, dtype=torch.float32, device="cpu")


def _distinct(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Returns the tensors with a view in place of one that stands before: Dynamo takes no tensor twice."""
    distinct: list[Tensor | None] = []
    for tensor in tensors:
        again = tensor is not None and any(tensor is other for other in distinct)
        distinct.append(tensor.view_as(tensor) if tensor is not None and again else tensor)
    return tuple(distinct)


def norm(
    x: Tensor, gamma: Tensor | None, bias: Tensor | None, spec: NormSpec, statistics: Statistics | None = None
) -> Tensor:
    """As `ops.norm.norm`."""
    y: Tensor = _apply(_Operands(x, None, None, gamma, bias, None, None, None), spec, statistics)
    return y


def add_norm(
    residual: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    statistics: Statistics | None = None,
) -> tuple[Tensor, Tensor]:
    """As `ops.add_norm.add_norm`."""
    y, z = _apply(_Operands(x, residual, None, gamma, bias, None, None, None), spec, statistics, store_z=True)
    return z, y


def residual_norm(
    residual: Tensor,
    x: Tensor,
    alpha: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    statistics: Statistics | None = None,
) -> Tensor:
    """As `ops.residual_norm.residual_norm`."""
    seed = seed if dropout else None
    y: Tensor = _apply(_Operands(x, residual, alpha, gamma, bias, seed, None, None), spec, statistics, dropout)
    return y


def handed_on(
    residual: Tensor,
    token: Tensor,
    x: Tensor,
    alpha: Tensor,
    next_alpha: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    statistics: Statistics | None = None,
) -> tuple[Tensor, Tensor]:
    """As `ops.handles.residual_norm_handle`, of the handle's parts; the second result is the new token."""
    seed = seed if dropout else None
    operands = _Operands(x, residual.detach(), alpha, gamma, bias, seed, token, next_alpha.detach())
    y, new_token = _apply(operands, spec, statistics, dropout)
    return y, new_token
