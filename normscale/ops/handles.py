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
from torch import Tensor

from normscale.ops.backends import Backend, choose
from normscale.ops.constants import Constants
from normscale.ops.residual_norm import check
from normscale.ops.spec import NormSpec
from normscale.ops.statistics import Statistics, write_row


@dataclass(frozen=True)
class Handle:
    """What a site gives the next one beside y: where the gradient of its residual goes, and that site's multiplier.

    Shape: token as y, without values; alpha 0-d or [D].
    """

    token: Tensor
    alpha: Tensor


class Opening(Constants):
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
    from normscale.ops import fused

    y, token = fused.handed_on(
        residual, handle.token, x, handle.alpha, next_alpha, gamma, bias, spec, dropout, seed, statistics
    )
    return y, Handle(token, next_alpha)


def watch_handle(y: Tensor, handle: Handle, grad_rows: Tensor | None, index: Tensor) -> tuple[Tensor, Handle]:
    """Returns a site's result and its handle; the statistics of the result's gradient go into row `index`.

    That gradient, dy + handle.alpha * dh, is otherwise made nowhere but inside the site's kernel: to measure it takes a
    pass over it of its own.

    Shape: y [..., D]; grad_rows [R, 3] fp32 or None; index [1] int64.
    """
    if grad_rows is None:
        return y, handle
    y, token = _WatchBoth.apply(y, handle.token, handle.alpha, grad_rows, index)  # type: ignore[no-untyped-call]
    return y, Handle(token, handle.alpha)


def token_of(y: Tensor) -> Tensor:
    """Returns a token of the shape of `y`."""
    return y.new_empty(()).expand(y.shape)


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(alpha)
        ctx.set_materialize_grads(False)
        return x.view_as(x), token_of(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        dy, dh = grads
        if dh is None:
            return dy, None
        (alpha,) = ctx.saved_tensors
        work = torch.promote_types(dh.dtype, alpha.dtype)
        dx = alpha * dh.to(work) if dy is None else torch.addcmul(dy.to(work), dh.to(work), alpha)
        return dx.to(dh.dtype), None


class _WatchBoth(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, token: Tensor, alpha: Tensor, rows: Tensor, index: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(alpha)
        ctx.set_materialize_grads(False)
        ctx.rows, ctx.index = rows, index
        return y.view_as(y), token.view_as(token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, dh = grads
        (alpha,) = ctx.saved_tensors
        total = dy
        if dh is not None:
            through = alpha * dh.to(torch.promote_types(dh.dtype, alpha.dtype))
            total = through if dy is None else dy + through
        if total is not None:
            write_row(ctx.rows, ctx.index, total)
        return dy, dh, None, None, None
