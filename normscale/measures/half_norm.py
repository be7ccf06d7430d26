"""The error of a norm whose statistics are computed in half precision."""

from typing import Literal

import torch
from torch import Tensor

from normscale.measures._rows import NormName, apart, normed, rows

ROWS, WIDTH = 256, 1024
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

Dtype = Literal["fp16", "bf16", "fp32"]


def measure(
    seed: int,
    norm: NormName,
    statistics: Dtype,
    inputs: Dtype,
    mean: float = 0.0,
    scale: float = 1.0,
    eps: float = 1e-5,
) -> dict[str, float]:
    """Returns `error`: the root mean square error against fp64 over that of the truth, 1 where nothing finite is left.

    Rows are scale * (mean + normal), rounded to `inputs`, whose fp64 norm is the truth. Every result of an operation
    (each square, partial sum, mean, root, product) is rounded to `statistics`. Sums are pairwise, as on a GPU.
    `bad_rows` is the share of rows with a number that is not finite, which count as all wrong.
    """
    x = (scale * (mean + rows(seed, ROWS, WIDTH))).to(DTYPES[inputs])
    truth = normed(norm, x.double(), eps)
    y = _rounded(norm, x.to(DTYPES[statistics]), eps).double()
    good = torch.isfinite(y).all(-1)
    y = torch.where(good[:, None], y, 0.0)
    return {"error": min(1.0, apart(y, truth)), "bad_rows": 1 - float(good.double().mean())}


def _rounded(norm: NormName, x: Tensor, eps: float) -> Tensor:
    """Returns the norm with every intermediate result in the dtype of `x`.

    Shape: x [rows, width]; result the same.
    """
    if norm == "layernorm":
        x = x - _mean(x)
    # A tensor in `dtype`: epsilon itself is rounded to it.
    return x * torch.rsqrt(_mean(x * x) + torch.tensor(eps, dtype=x.dtype))


def _mean(x: Tensor) -> Tensor:
    """Returns the mean of each row by halving it again and again; each sum is rounded to the dtype of `x`."""
    width = x.shape[-1]
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x / width
