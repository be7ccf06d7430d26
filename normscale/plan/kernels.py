"""What PyTorch's own GPU kernels keep for the backward pass, where a CPU has others.

A plan is made where there may be no GPU. Two functions of the model have kernels on a GPU that keep less than what a
CPU runs: fused attention (never the scores, with dropout neither) and dropout (one byte an entry instead of a factor).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normscale.ops.backends import counted_as


class _Attention(torch.autograd.Function):
    """Keeps q, k, v, the result, and one fp32 number a row (log of the sum of exponentials).

    Shape: q [B, H, T, K]; k, v [B, H, S, K]; result as q.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty_like(grads[0])


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not p or not training:
        return x
    out: Tensor = _Dropout.apply(x)  # type: ignore[no-untyped-call]
    return out


def _attention(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    out: Tensor = _Attention.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


@contextmanager
def as_on(device: str) -> Iterator[None]:
    """Lets what runs inside, on fake CPU tensors, keep what it would on a device of this kind.

    The norms' kernels are `ops.fused`'s own. The two functions are replaced for the time being: a TorchFunctionMode
    would not reach what checkpointing runs again inside the backward pass.
    """
    if device == "cpu":
        yield
        return
    names = {"scaled_dot_product_attention": _attention, "dropout": _dropout}
    before = {name: getattr(F, name) for name in names}
    try:
        for name, stand_in in names.items():
            setattr(F, name, stand_in)
        with counted_as(device):
            yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)
