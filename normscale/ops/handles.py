"""How two sites of a fused Post-Norm stack share one gradient: the residual-handle protocol.

A site's result y goes two ways: to the next branch, and, times the next alpha, into the next sum. In the backward pass
the next site then writes two gradients, dz for its branch and alpha * dz for its residual, and autograd adds the
latter to what comes back through the branch. With a handle the next site gives dz for both, one tensor, and this site
forms dy + next_alpha * dz inside its own kernel: 8 passes over the activation in place of 11.

The handle is a tensor without values, which only autograd follows; the values of the residual are those of y, detached.
A second view of y would do in eager mode, but a compiler hands out one of two aliases and makes the other anew
outside its graph, where its gradient would not be multiplied by alpha. The token is one number seen at every place
(stride 0), neither written nor read: a checkpoint that keeps a handle keeps no second activation.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from normscale.ops.backends import Backend, choose
from normscale.ops.residual_norm import check
from normscale.ops.spec import NormSpec
from normscale.ops.statistics import Statistics


@dataclass(frozen=True)
class Handle:
    """What a site gives the next one beside y: where the gradient of its residual goes, and that site's multiplier.

    Shape: token as y, without values; alpha 0-d or [D].
    """

    token: Tensor
    alpha: Tensor


class Opening(nn.Module):
    """Makes of what enters a stack its stream: the tensor alone, or with a handle on it where the norms are fused.

    That the first site takes a handle too keeps one compiled graph for all blocks.

    Shape: x [..., D]; results: x, and a handle on it.
    """

    alpha: Tensor
    backend: Backend = "auto"

    def __init__(self, spec: NormSpec | None, alpha: float) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("alpha", torch.tensor(alpha, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        asks = self.backend == "triton" or (self.backend == "auto" and not x.is_cpu)
        if asks and choose(self.backend, "residual_norm", self.spec, x, None, None) == "triton":
            return open_handle(x, self.alpha)
        return (x,)


def open_handle(x: Tensor, alpha: Tensor) -> tuple[Tensor, Handle]:
    """Returns `x` and a handle on it for a site whose multiplier is `alpha`.

    Backward: dx = dy + alpha * dh, where dh is the gradient that the site gives the handle.

    Shape: x [..., D]; alpha 0-d or [D], without a gradient.
    """
    y, token = _Open.apply(x, alpha)  # type: ignore[no-untyped-call]
    return y, Handle(token, alpha)


def residual_norm_handle(
    residual: Tensor,
    handle: Handle,
    x: Tensor,
    next_alpha: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    *,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    statistics: Statistics | None = None,
) -> tuple[Tensor, Handle]:
    """Returns y = Norm(handle.alpha * residual + drop(x)) on the Triton kernels, and a handle on it for the next site.

    `handle` came with `residual`, from the site before or from `open_handle`. The numbers, gradients included, are
    those of `ops.residual_norm`.

    Shape: residual, x [..., D]; next_alpha 0-d or [D]; gamma, bias [D] or None; seed 0-d int64; y [..., D].

    Raises:
        BadInput: as `ops.residual_norm`.
        BackendError: the kernels cannot run on these tensors.
    """
    check(residual, x, handle.alpha, gamma, bias, dropout, seed, statistics, next_alpha)
    choose("triton", "residual_norm", spec, x, gamma, bias, residual)
    from normscale.ops import registered  # noqa: F401 (it registers the operations)

    y, token = _Site.apply(  # type: ignore[no-untyped-call]
        residual.detach(),
        handle.token,
        x,
        handle.alpha,
        gamma,
        bias,
        next_alpha.detach(),
        seed if dropout else None,
        float(dropout),
        spec.kind,
        spec.eps,
        spec.zero_centred,
        *(getattr(statistics, name, None) for name in ("rows", "z", "y", "grad_rows", "dz")),
    )
    return y, Handle(token, next_alpha)


def _token(y: Tensor) -> Tensor:
    return y.new_empty(()).expand(y.shape)


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(alpha)
        ctx.set_materialize_grads(False)
        return x.view_as(x), _token(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        dy, dh = grads
        if dh is None:
            return dy, None
        (alpha,) = ctx.saved_tensors
        work = torch.promote_types(dh.dtype, alpha.dtype)
        dx = alpha * dh.to(work) if dy is None else torch.addcmul(dy.to(work), dh.to(work), alpha)
        return dx.to(dh.dtype), None


class _Site(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        token: Tensor,
        x: Tensor,
        alpha: Tensor,
        gamma: Tensor | None,
        bias: Tensor | None,
        next_alpha: Tensor,
        seed: Tensor | None,
        dropout: float,
        kind: str,
        eps: float,
        zero_centred: bool,
        rows: Tensor | None,
        z_index: Tensor | None,
        y_index: Tensor | None,
        grad_rows: Tensor | None,
        dz_index: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.norm = (dropout, kind, float(eps), zero_centred)
        ctx.dtypes = x.dtype, residual.dtype, None if bias is None else bias.dtype
        ctx.grad_rows, ctx.dz_index = grad_rows, dz_index
        measured = rows is not None and z_index is not None, rows is not None and y_index is not None
        y, _, moments, z_partials, y_partials = torch.ops.normscale.norm_forward(
            x, residual, alpha, gamma, bias, seed, *ctx.norm, False, *measured
        )
        for partials, index, wanted in zip((z_partials, y_partials), (z_index, y_index), measured, strict=True):
            if wanted:
                torch.ops.normscale.write_partials(partials, rows, index)
        ctx.save_for_backward(x, residual, alpha, gamma, next_alpha, seed, moments)
        return y, _token(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        x, residual, alpha, gamma, next_alpha, seed, moments = ctx.saved_tensors
        nothing = (None,) * 11
        if dy is None:
            if dh is None:
                return None, None, None, None, None, None, *nothing
            dy = torch.zeros_like(dh)
        _, need_token, need_x, need_alpha, need_gamma, need_bias = ctx.needs_input_grad[:6]
        x_dtype, residual_dtype, bias_dtype = ctx.dtypes
        measured = ctx.grad_rows is not None and ctx.dz_index is not None
        shared = need_x and need_token and ctx.norm[0] == 0 and x_dtype is residual_dtype  # one tensor for both
        dx, dresidual, dgamma, dbias, dalpha, partials = torch.ops.normscale.norm_backward(
            dy,
            dh,
            None if dh is None else next_alpha,
            None,
            x,
            residual,
            alpha,
            gamma,
            seed,
            moments,
            *ctx.norm,
            x_dtype if need_x else None,
            residual_dtype if need_token and not shared else None,
            False,
            need_gamma,
            need_bias,
            need_alpha,
            measured,
        )
        if measured:
            torch.ops.normscale.write_partials(partials, ctx.grad_rows, ctx.dz_index)
        if need_alpha and alpha.dim() == 0:
            dalpha = dalpha.sum()
        return (
            None,
            (dx if shared else dresidual) if need_token else None,
            dx if need_x else None,
            dalpha.to(alpha.dtype) if need_alpha else None,
            dgamma.to(gamma.dtype) if need_gamma else None,
            dbias.to(bias_dtype) if need_bias else None,
            *nothing,
        )
