"""Inputs that broke norms elsewhere: rows, widths, layouts and dtypes.

Each row builder returns one row; a test puts it between ordinary rows, which must not be moved by it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.ops.oracle import Op, Problem

# Every width of interest, from one element to beyond the widest kernel: powers of two, their neighbours, multiples of
# 4 and of 8 that are no multiple of 16, and model widths.
WIDTHS = (1, 2, 3, 7, 17, 64, 96, 100, 127, 128, 129, 255, 256, 257, 384, 512, 768, 1000, 1025, 1536, 4095, 4097, 4100)
WIDTHS += (4104, 5120, 8192, 12288, 16384)

ROWS: dict[str, Callable[[int], Tensor]] = {
    "zero": torch.zeros,
    "constant": lambda d: torch.full((d,), 3.0),
    "mean 1e3": lambda d: 1e3 + torch.randn(d),
    "mean 1e4": lambda d: 1e4 + torch.randn(d),
    "mean 1e5": lambda d: 1e5 + torch.randn(d),
    "outlier": lambda d: torch.randn(d).index_fill_(0, torch.tensor([d // 2]), 1e4),
    "tiny": lambda d: 1e-20 * torch.randn(d),
    "denormal": lambda d: torch.full((d,), 1e-40) * torch.arange(d),
    "large": lambda d: 1e15 * torch.randn(d),
}
NON_FINITE = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


def problem(
    op: Op = "residual_norm",
    kind: str = "layernorm",
    shape: tuple[int, ...] = (3, 64),
    dtype: torch.dtype = torch.float32,
    *,
    weights: torch.dtype = torch.float32,
    stream: torch.dtype | None = None,
    alpha: Tensor | None = None,
    mean: float = 1.0,
    seed: int = 0,
    affine: str = "gamma bias",
    **options: object,
) -> Problem:
    """Returns an operation on ordinary numbers, rounded to their dtypes; a mean that is not zero shows bad masks.

    `stream` is the dtype of the residual where it is another. `options` replace fields of the `Problem`.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    width = shape[-1]
    x = (normal(*shape) + mean).to(dtype)
    residual = (normal(*shape) + mean).to(stream or dtype)
    out = torch.promote_types(x.dtype, residual.dtype) if op != "norm" else dtype
    given = {
        "x": x,
        "residual": None if op == "norm" else residual,
        "alpha": (torch.tensor(1.7) if alpha is None else alpha) if op == "residual_norm" else None,
        "gamma": (1 + 0.3 * normal(width)).to(weights) if "gamma" in affine else None,
        "bias": normal(width).to(weights) if "bias" in affine else None,
        "dy": normal(*shape).to(out),
        "dz": normal(*shape).to(out) if op == "add_norm" else None,
    }
    if kind == "rmsnorm":
        given["bias"] = given["bias"] if "rms" in affine else None
    return Problem(op=op, kind=kind, **(given | options))  # type: ignore[arg-type]


def expanded(shape: tuple[int, ...]) -> Tensor:
    """Returns the gradient that `.sum()` sends: one number with stride 0 everywhere."""
    return torch.ones(()).expand(shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every second column": lambda x: torch.stack([x, torch.full_like(x, 7.0)], -1).flatten(-2)[..., ::2],
    "columns of a wider one": lambda x: torch.cat([x, torch.full_like(x, 7.0)], -1)[..., : x.shape[-1]],
    "offset by one element": lambda x: torch.cat([torch.zeros(1, dtype=x.dtype), x.flatten()])[1:].view(x.shape),
    "every second row": lambda x: torch.stack([x, torch.full_like(x, 7.0)], 1).flatten(0, 1)[::2],
}
