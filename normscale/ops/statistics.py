"""Row statistics of a tensor: what the probes ask of every stream and branch."""

import torch
from torch import Tensor

STATISTICS = ("sum_of_squares", "absmax", "nonfinite")


def statistics(x: Tensor) -> Tensor:
    """Returns [sum of squares, largest absolute value, number of non-finite entries] of `x` in fp32.

    Sums of squares and not their roots, since only sums and maxima can be folded over micro-batches and ranks. A NaN
    makes the first two NaN; the third is always finite.

    Shape: x any; result [3].
    """
    x = x.detach().float()
    return torch.stack([x.square().sum(), x.abs().amax(), (~torch.isfinite(x)).sum().float()])


def write_row(rows: Tensor, index: Tensor, x: Tensor) -> None:
    """Writes the statistics of `x` into row `index` of `rows`, in place.

    Overwriting (and not adding) keeps activation checkpointing harmless: the recomputed forward writes the same row
    again. The index is a tensor, since a Python number would make one compiled graph a layer.

    Shape: rows [R, 3] fp32; index [1] int64.
    """
    with torch.no_grad():
        rows.index_copy_(0, index, statistics(x).unsqueeze(0))
