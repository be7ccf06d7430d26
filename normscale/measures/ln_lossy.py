"""How well the mean of a row can be told from its normalised form."""

from typing import Literal

import torch
from torch import Tensor

from normscale.measures._rows import normed, rows

ROWS = 4096


def measure(
    seed: int, norm: Literal["layernorm", "rmsnorm", "none"], width: int, eps: float = 1e-5
) -> dict[str, float]:
    """Returns R^2 on held-out rows of the best linear prediction of the row's mean, and of its mean over its RMS.

    Rows are normal, of unit variance about a mean that is itself normal with deviation 1, and scaled by a factor from
    1/2 to 2 that is even in the logarithm.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    mean = torch.randn(2 * ROWS, 1, generator=generator, dtype=torch.float64)
    scale = 2 ** (2 * torch.rand(2 * ROWS, 1, generator=generator, dtype=torch.float64) - 1)
    x = scale * (mean + rows(seed, 2 * ROWS, width))
    y = x if norm == "none" else normed(norm, x, eps)
    own = x.mean(-1)
    targets = {"mean": own, "mean_share": own / x.square().mean(-1).sqrt()}
    return {name: _explained(y, target) for name, target in targets.items()}


def _explained(y: Tensor, target: Tensor) -> float:
    """Returns R^2 on the second half of the rows of a least-squares fit on the first.

    Shape: y [rows, width]; target [rows].
    """
    half = len(y) // 2
    inputs = torch.cat([y, torch.ones(len(y), 1, dtype=y.dtype)], dim=1)
    # The rows of a LayerNorm add up to 0: the driver has to cope with inputs that are not independent.
    weights = torch.linalg.lstsq(inputs[:half], target[:half, None], driver="gelsd").solution
    left = target[half:] - (inputs[half:] @ weights)[:, 0]
    return float(1 - left.square().mean() / target[half:].var(correction=0))
