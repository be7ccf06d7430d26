"""Row statistics of a tensor: what the probes ask of every stream and branch."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normscale.errors import BadInput

STATISTICS = ("sum_of_squares", "absmax", "nonfinite")

PIECE = 2**18  # entries that are read together on the host: the second reading finds them in the cache
LARGEST = torch.finfo(torch.float32).max


class Buffers(NamedTuple):
    """Where a measured pass through a model writes, one row a quantity; what is None is not measured.

    Rows are the same in all but the samples. A site has one for its branch, one for every stream after the join and,
    where the scheme normalises a sum z = alpha * residual + branch, a last one for z. What a site has only one of
    (attention) stands in the row of its branch. Samples have, of each side, a row for what enters it and one a block.

    They are no buffers of the model: neither a checkpoint nor an engine has anything to do with them.

    Shape: rows, grad_rows [R, 3] (`STATISTICS` of tensors and of their gradients); sums [R, 1], of the streams'
    entries; attention [R, 2], largest logit and mean entropy; samples [blocks + sides, places, D], of the first stream
    (see `ops.sampled` for both). All fp32.
    """

    rows: Tensor
    grad_rows: Tensor | None = None
    sums: Tensor | None = None
    attention: Tensor | None = None
    samples: Tensor | None = None


@dataclass(frozen=True)
class Statistics:
    """Where an operation writes the statistics of what it normalises (z), of its result (y) and of z's gradient (dz).

    In Pre-Norm z is the stream; in the Post-Norm family it is alpha * residual + branch, which exists nowhere else.
    Whoever hands out the row numbers says which. What has no row number is not measured and costs nothing.
    On the kernels measuring changes no bit of any result up to width 8192; above, other warps and a kernel of its own
    for the weights' gradients change the order of sums.

    Shape: rows, grad_rows [R, 3] fp32; z, y, dz [1] int64, row numbers (see `write_row`); dz belongs to grad_rows.

    Raises:
        BadInput: a tensor has another shape, dtype or device than the others need, or rows are not contiguous.
    """

    rows: Tensor
    z: Tensor | None = None
    y: Tensor | None = None
    grad_rows: Tensor | None = None
    dz: Tensor | None = None

    def __post_init__(self) -> None:
        for what, rows in (("rows", self.rows), ("grad_rows", self.grad_rows)):
            if rows is None:
                continue
            if rows.dim() != 2 or rows.shape[1] != 3 or rows.dtype is not torch.float32 or not rows.is_contiguous():
                has = f"{rows.dtype}, shape {tuple(rows.shape)}, strides {rows.stride()}"
                raise BadInput(f"statistics: {what} has {has}; it is [R, 3], float32 and contiguous")
            if rows.device != self.rows.device:
                raise BadInput(f"statistics: {what} is on {rows.device} and rows on {self.rows.device}")
        for what, index in (("z", self.z), ("y", self.y), ("dz", self.dz)):
            if index is None:
                continue
            if index.shape != (1,) or index.dtype is not torch.int64:
                has = f"{index.dtype}, shape {tuple(index.shape)}"
                raise BadInput(f"statistics: {what} has {has}; it is a row number, [1] and int64")
            if index.device != self.rows.device:
                raise BadInput(f"statistics: {what} is on {index.device} and rows on {self.rows.device}")

    def check(self, name: str, x: Tensor) -> None:
        """Raises BadInput where what is measured lies on another device than the rows."""
        if self.rows.device != x.device:
            raise BadInput(f"{name}: rows of the statistics are on {self.rows.device} and x on {x.device}")

    def write(self, z: Tensor | None, y: Tensor | None) -> None:
        """Writes what is asked of a forward pass; None is not at hand."""
        for index, tensor in ((self.z, z), (self.y, y)):
            if index is not None and tensor is not None:
                write_row(self.rows, index, tensor)

    def watch(self, z: Tensor) -> Tensor:
        """Returns `z`, whose gradient will be measured on its way back."""
        return z if self.dz is None else watch(z, self.grad_rows, self.dz)


def statistics(x: Tensor) -> Tensor:
    """Returns [sum of squares, largest absolute value, number of non-finite entries] of `x` in fp32.

    Sums of squares and not their roots, since only sums and maxima can be folded over micro-batches and ranks. A NaN
    makes the first two NaN; the third is always finite. An empty tensor gives zeros.

    Shape: x any; result [3].
    """
    x = x.detach().float()
    if x.numel() == 0:
        return x.new_zeros(3)
    if on_host(x):
        return torch.tensor(_read(x), dtype=torch.float32)
    return torch.stack([x.square().sum(), x.abs().amax(), (~torch.isfinite(x)).sum().float()])


def on_host(x: Tensor) -> bool:
    """Returns whether the entries of `x` lie on the host now, so that to look at one waits for nothing."""
    return x.is_cpu and not torch.compiler.is_compiling()


def _read(x: Tensor) -> tuple[float, float, float]:
    """Returns the statistics of what lies on the host, at a fifth of the cost of the operations they are defined by.

    A finite sum of squares has no term that is not finite, so that entries are counted only where it is not.

    Shape: x any fp32, not empty, without a gradient.
    """
    x = x.reshape(-1)
    squares, largest = 0.0, 0.0
    for piece in (x,) if x.numel() <= PIECE else torch.split(x, PIECE):
        squares += float(torch.dot(piece, piece))
        low, high = torch.aminmax(piece)  # one reading, on all threads
        largest = max(largest, float(high), -float(low))
    if squares <= LARGEST:
        return squares, largest, 0.0
    squares = math.nan if math.isnan(squares) else math.inf
    return squares, max(float(x.amax()), -float(x.amin())), float(x.numel() - int(torch.isfinite(x).sum()))


def write_row(rows: Tensor, index: Tensor, x: Tensor) -> None:
    """Writes the statistics of `x` into row `index` of `rows`, in place.

    Overwriting (and not adding) keeps activation checkpointing harmless: the recomputed forward writes the same row
    again. The index is a tensor, since a Python number would make one compiled graph a layer.

    Shape: rows [R, 3] fp32; index [1] int64.
    """
    if on_host(rows) and x.numel():
        rows.numpy()[int(index)] = _read(x.detach().float())
    else:
        with torch.no_grad():
            rows.index_copy_(0, index, statistics(x).unsqueeze(0))


def write_sum(sums: Tensor | None, index: Tensor, x: Tensor) -> None:
    """Writes the sum of the entries of `x`, in fp32, into row `index`, where there is a buffer for it.

    Shape: sums [R, 1] fp32 or None; index [1] int64.
    """
    if sums is not None:
        write(sums, index, x.detach().sum(dtype=torch.float32))


def write(buffer: Tensor, index: Tensor, values: Tensor) -> None:
    """Writes one row of a buffer, in place.

    Shape: buffer [R, n] fp32; index [1] int64; values n of them, without a gradient.
    """
    if on_host(buffer):
        buffer.numpy()[int(index)] = values.numpy()  # a few operations less; they add up over 2000 sites
    else:
        with torch.no_grad():
            buffer.index_copy_(0, index, values.view(1, -1))


def watch(x: Tensor, grad_rows: Tensor | None, index: Tensor) -> Tensor:
    """Returns `x`; the statistics of its gradient go into row `index` on the way back, where there are rows for it.

    Shape: grad_rows [R, 3] fp32 or None; index [1] int64.
    """
    if grad_rows is None:
        return x
    watched: Tensor
    if torch.compiler.is_compiling():  # which takes no hook on what a graph makes
        watched = _Watch.apply(x, grad_rows, index)  # type: ignore[no-untyped-call]
        return watched
    watched = x.view_as(x)  # of which only what reads it after this has a share in the gradient
    if watched.requires_grad:
        watched.register_hook(lambda gradient: write_row(grad_rows, index, gradient))  # type: ignore[no-untyped-call]
    return watched


class _Watch(torch.autograd.Function):
    """The identity; backward writes the statistics of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        ctx.rows, ctx.index = rows, index
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        write_row(ctx.rows, ctx.index, grads[0])
        return grads[0], None, None
