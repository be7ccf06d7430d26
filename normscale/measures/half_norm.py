"""The error of a norm whose statistics are computed in half precision."""

from typing import Literal

import torch

from normscale.measures._half import rounded
from normscale.measures._rows import NormName, normed, relative_error, rows

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
    y = rounded(norm, x.to(DTYPES[statistics]), eps).double()
    good = torch.isfinite(y).all(-1)
    y = torch.where(good[:, None], y, 0.0)
    return {"error": min(1.0, relative_error(y, truth)), "bad_rows": 1 - float(good.double().mean())}
