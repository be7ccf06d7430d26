"""Random rows that measurements share."""

from typing import Literal

import torch
from torch import Tensor

from normscale.ops.norm import layernorm, rmsnorm

NormName = Literal["layernorm", "rmsnorm"]


def rows(seed: int, count: int, width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns normal rows of unit variance.

    Shape: result [count, width].
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator, dtype=dtype)


def normed(norm: NormName, x: Tensor, eps: float) -> Tensor:
    """Returns the norm of rows, without gain and bias.

    Shape: x [..., D]; result [..., D].
    """
    return layernorm(x, None, None, eps) if norm == "layernorm" else rmsnorm(x, None, eps)


def size(x: Tensor) -> Tensor:
    """Returns the L2 norm of each row.

    Shape: x [..., D]; result [...].
    """
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return lengths


def relative_error(x: Tensor, truth: Tensor) -> float:
    """Returns the root mean square error of rows over the root mean square of what they should be."""
    return float((x.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt())
