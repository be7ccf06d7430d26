"""Where a norm without gain and bias puts vectors, and which properties of a linear map it has."""

from typing import Literal

from torch import Tensor

from normscale.measures._rows import normed, rows, size

ROWS = 256

Form = Literal["layernorm", "rmsnorm", "unit", "centred"]
"""A norm, a row over its length, a row less its mean."""


def measure(seed: int, norm: Form, width: int, eps: float = 1e-5) -> dict[str, float]:
    """Returns, over random rows x and y of unit variance in fp64:

    - `length_spread`: the standard deviation of |Norm(x)|, in means;
    - `unit_distance`: mean of | |Norm(x)| - 1 |, from the unit sphere;
    - `small_length`: mean of |Norm(x)| / sqrt(width) for x of size sqrt(eps), where eps and the variance are equal;
    - `additivity`: |Norm(x + y) - Norm(x) - Norm(y)| / |Norm(x + y)|, 0 for a linear map;
    - `collapse`: |Norm(x) - Norm(3 x)| / |Norm(x)|, 0 where distinct inputs have one output, so that no map leads back.
    """
    both = rows(seed, 2 * ROWS, width)
    x, y = both[:ROWS], both[ROWS:]

    def of(x: Tensor) -> Tensor:
        if norm == "unit":
            return x / size(x)[:, None]
        if norm == "centred":
            return x - x.mean(-1, keepdim=True)
        return normed(norm, x, eps)

    length = size(of(x))
    return {
        "length_spread": float(length.std() / length.mean()),
        "unit_distance": float((length - 1).abs().mean()),
        "small_length": float(size(of(x * eps**0.5)).mean() / width**0.5),
        "additivity": float((size(of(x + y) - of(x) - of(y)) / size(of(x + y))).mean()),
        "collapse": float((size(of(x) - of(3 * x)) / length).mean()),
    }
