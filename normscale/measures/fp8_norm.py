"""What fp8 makes of a norm: its output rounded to e4m3 or e5m2 with one scale, and what the norms around do to that."""

from typing import Literal

import torch
from torch import Tensor

from normscale.measures._rows import NormName, apart, normed, rows

ROWS, WIDTH = 256, 1024
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}

Format = Literal["e4m3", "e5m2", "bf16"]
Where = Literal["output", "input", "statistics"]


def measure(
    seed: int, norm: NormName, format: Format, where: Where, outlier: float = 0.0, eps: float = 1e-5
) -> dict[str, float]:
    """Returns `error`: the root mean square error of the norm against fp64, over the truth's.

    Rounded is what the norm gives, what it takes, or all that its statistics are made of (input, squares, mean). A
    rounding has one scale for the tensor, so that the largest absolute value is the format's largest. One feature in
    1024 is `outlier` times as large as the others, as some are in trained models; 0: none. It counts for nothing in
    the error: what it does to the others does. `flushed` is the share of the entries that the rounding of input or
    output makes zero.
    """
    x, odd = rows(seed, ROWS, WIDTH), seed % WIDTH
    if outlier:
        x[:, odd] *= outlier
    truth = normed(norm, x, eps)
    counted = torch.ones(WIDTH, dtype=torch.bool)
    counted[odd] = not outlier

    def error(y: Tensor) -> float:
        return apart(y[:, counted], truth[:, counted])

    if where == "output":
        y = _round(truth, format)
        return {"error": error(y), "flushed": float((y == 0).double().mean())}
    given = _round(x, format)
    flushed = float((given == 0).double().mean())
    if where == "input":
        return {"error": error(normed(norm, given, eps)), "flushed": flushed}
    centred = given - _round(given.mean(-1, keepdim=True), format) if norm == "layernorm" else given
    power = _round(_round(centred.square(), format).mean(-1, keepdim=True), format)
    return {"error": error(centred * torch.rsqrt(power + eps)), "flushed": flushed}


def _round(x: Tensor, format: Format) -> Tensor:
    """Returns `x` as the format holds it, with one scale for all of it where it is an fp8."""
    if format == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    kept = FORMATS[format]
    scale = torch.finfo(kept).max / x.abs().max().clamp_min(1e-30)
    return (x * scale).to(kept).to(x.dtype) / scale
