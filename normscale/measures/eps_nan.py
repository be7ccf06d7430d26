"""What epsilon does to the gradients of norms over rows that are constant, or nearly so."""

from typing import Literal

import torch

from normscale.measures._rows import NormName, normed, rows, size

ROWS, WIDTH = 64, 256
TINY = 1e-6  # relative: what a nearly constant row varies by

Kind = Literal["zero", "constant", "nearly", "normal"]


def measure(seed: int, norm: NormName, eps: float, kind: Kind, stacked: int = 1) -> dict[str, float]:
    """Returns, in fp32, for rows through `stacked` norms one after the other:

    - `bad_rows`: share of the rows whose value or gradient holds a number that is not finite;
    - `amplification`: median of |dL/dx| / |dL/dy| over the rows whose gradient is finite, 0 where there are none;
      bounded by 1 / sqrt(eps) for one norm.

    Rows are zero, constant (some value from 1 to 2), nearly constant (they vary by a millionth of it), or normal.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    level = 1 + torch.rand(ROWS, 1, generator=generator)
    noise = rows(seed, ROWS, WIDTH, torch.float32)
    made = {
        "zero": torch.zeros(ROWS, WIDTH),
        "constant": level.expand(ROWS, WIDTH),
        "nearly": level * (1 + TINY * noise),
        "normal": noise,
    }
    x = made[kind].clone().requires_grad_()
    y = x
    for _ in range(stacked):
        y = normed(norm, y, eps)
    back = torch.randn(ROWS, WIDTH, generator=generator)
    (grad,) = torch.autograd.grad(y, x, back)
    good = torch.isfinite(grad).all(-1) & torch.isfinite(y.detach()).all(-1)
    gain = size(grad)[good] / size(back)[good]
    return {
        "bad_rows": 1 - float(good.float().mean()),
        "amplification": float(gain.median()) if len(gain) else 0.0,
    }
