"""From which input size on the statistics of a norm overflow in fp16, and what changes with scale."""

from typing import Literal

import torch
from torch import Tensor

from normscale.measures._half import mean, rounded
from normscale.measures._rows import relative_error, rows

ROWS, WIDTH = 64, 1024
LARGEST = 65504.0  # of fp16
POWERS = 16  # sizes tried: 2^-8 to 2^15

Form = Literal["layernorm", "rmsnorm", "article", "scaled"]


def measure(seed: int, form: Form, eps: float = 1e-5) -> dict[str, float]:
    """Returns, with every result of an operation rounded to fp16:

    - `largest`: log2 of the largest tried size of normal rows whose norm is finite throughout and within 5 %;
    - `scale_error`: |Norm(4 x) - Norm(x)| / |Norm(x)| in fp64, 0 for a norm that does not mind the scale.

    Forms: the two norms as they are; `article`: the row over its largest absolute value, over the deviation of that
    (nothing is centred, see `normscale.norms.maxnorm`), multiplied by the value again; `scaled`: LayerNorm of the row
    over its largest absolute value. Both divide before the statistics.
    """
    x = rows(seed, ROWS, WIDTH)
    largest = -8.0
    for power in range(-8, POWERS):
        given = x * 2.0**power
        if float(given.abs().max()) > LARGEST:
            break
        y, truth = _of(form, given.half(), eps).double(), _of(form, given.half().double(), eps)
        if bool(torch.isfinite(y).all()) and relative_error(y, truth) < 0.05:
            largest = float(power)
    return {"largest": largest, "scale_error": relative_error(_of(form, 4 * x, eps), _of(form, x, eps))}


def _of(form: Form, x: Tensor, eps: float) -> Tensor:
    """Returns a form of the norm with every result in the dtype of `x`.

    Shape: x [rows, width]; result the same.
    """
    if form == "layernorm" or form == "rmsnorm":
        return rounded(form, x, eps)
    top = x.abs().amax(-1, keepdim=True)
    y = x / top
    if form == "scaled":
        return rounded("layernorm", y, eps)
    centred = y - mean(y)
    deviation = torch.sqrt(mean(centred * centred) + torch.tensor(eps, dtype=x.dtype))
    return y / deviation * top
