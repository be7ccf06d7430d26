"""Norms in half precision, operation by operation."""

import torch
from torch import Tensor

from normscale.measures._rows import NormName


def rounded(norm: NormName, x: Tensor, eps: float) -> Tensor:
    """Returns the norm with every intermediate result in the dtype of `x`.

    Shape: x [rows, width]; result the same.
    """
    if norm == "layernorm":
        x = x - mean(x)
    # A tensor in `dtype`: epsilon itself is rounded to it.
    return x * torch.rsqrt(mean(x * x) + torch.tensor(eps, dtype=x.dtype))


def mean(x: Tensor) -> Tensor:
    """Returns the mean of each row by halving it again and again; each sum is rounded to the dtype of `x`.

    Shape: x [rows, width]; result [rows, 1].
    """
    width = x.shape[-1]
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x / width
