"""L2 norms of what fp32 cannot square, or not add up: of a deep model's gradients, say.

One sum in fp32 over 5 million entries is off by 1e-4: a CPU sums pieces of a long row. Below 1e-22 a square in fp32 is
0, above 2e19 it is infinite. A CPU sums in fp64 at a tenth of the speed, so that it does so only where a sum in fp32
has come out too small or too large; asking costs nothing there. A GPU waits for memory and not for fp64, and asking
would make the host wait for it: it sums in fp64 at once.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscale.ops.statistics import PIECE

Array = NDArray[np.float64]

LONG = 2**16  # entries of a row that is read by threads, in pieces that they sum in fp32
LEAST_SQUARE = 1e-30  # of a sum of squares in fp32 that lacks nothing
LEAST = 1e-12  # of a norm that lacks nothing: entries whose squares fp32 cannot hold are below 1e-19


def lengths(rows: Tensor) -> Tensor:
    """Returns the norm of each row.

    Shape: rows [n, m]; result [n] fp64.
    """
    norms: Tensor
    if rows.device.type != "cpu":
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        return norms
    wide = torch.promote_types(rows.dtype, torch.float32)
    if rows.shape[1] >= LONG:
        squares = [sum(_square_of(part.to(wide)) for part in row.split(PIECE)) for row in rows.detach()]
        norms = torch.tensor(squares, dtype=torch.float64).sqrt()
    else:
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=wide).double()
    for i in lost(norms):
        norms[i] = torch.linalg.vector_norm(rows[i], dtype=torch.float64)
    return norms


def length(x: Tensor) -> Tensor:
    """Returns the norm of a tensor of any strides, without a copy of it.

    Shape: result 0-d fp64.
    """
    if x.is_contiguous():
        return lengths(x.reshape(1, -1))[0]
    cpu = x.device.type == "cpu"
    wide = torch.promote_types(x.dtype, torch.float32) if cpu else torch.float64
    norm: Tensor = torch.linalg.vector_norm(x, dtype=wide).double()
    if cpu and lost(norm[None]):
        norm = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm


def _square_of(part: Tensor) -> float:
    return float(torch.dot(part, part))


def lost(norms: Tensor) -> list[int]:
    """Returns which of some norms, summed in fp32 and on the host, are to be summed in fp64.

    Shape: norms [n].
    """
    sound = (norms >= LEAST) & (norms < torch.inf)
    return [] if bool(sound.all()) else (~sound).nonzero().flatten().tolist()


def within(sizes: Array, squares: Array, low: Array | float, high: Array | float) -> Array:
    """Returns sizes, those whose sum of squares fp32 does not hold brought within what they can be.

    Shape: sizes, squares, and low and high or what they broadcast to [...].
    """
    sound = (squares >= LEAST_SQUARE) & (squares < np.inf)
    return np.where(sound, sizes, np.clip(sizes, low, high))
