"""What epsilon costs a norm that would not need it, and what becomes of rows that do, in half precision."""

from typing import Literal

import torch

from normscale.measures._half import rounded
from normscale.measures._rows import relative_error, rows

ROWS, WIDTH = 64, 1024

Place = Literal["inside", "outside"]


def measure(seed: int, eps: float, place: Place, scale: float = 1.0) -> dict[str, float]:
    """Returns, of RMSNorm with eps inside the root or added to it:

    - `error`: how far the norm of normal rows of size `scale` is from that with eps 0, in fp64, over its size;
    - `bad_rows`: share of rows of zeros whose norm is not finite when every result of an operation is rounded to fp16.
    """
    x = scale * rows(seed, ROWS, WIDTH)
    root = x.square().mean(-1, keepdim=True).sqrt()
    truth = x / root
    y = x / (root.square() + eps).sqrt() if place == "inside" else x / (root + eps)
    zeros = torch.zeros(ROWS, WIDTH, dtype=torch.float16)
    half = rounded("rmsnorm", zeros, eps) if place == "inside" else zeros / torch.tensor(eps, dtype=torch.float16)
    bad = ~torch.isfinite(half).all(-1)
    return {"error": relative_error(y, truth), "bad_rows": float(bad.double().mean())}
