"""A linear layer that knows what each range of its rows is for."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from normscale.ops.products import NATIVE, Products
from normscale.schemes.scheme import Part, Role


class Projection(nn.Module):
    """y = x W^T + b, where the rows of W are one or several named parts (q, k and v in one product, say).

    One product instead of three is quicker, and a fan-in and fan-out of its own for each part keeps the init what it
    would be for three layers. Values are left uninitialised: the builder fills them by role.

    Shape: x [..., D_in]; y [..., sum of the parts' widths].
    """

    products: Products = NATIVE

    def __init__(self, kind: Literal["self", "cross", "ffn"], d_in: int, parts: dict[Part, int], bias: bool) -> None:
        super().__init__()
        self.kind: Literal["self", "cross", "ffn"] = kind
        self.parts = parts
        width = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(width, d_in))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.products.linear(x, self.weight, self.bias)

    def roles(self) -> Iterator[tuple[str, slice, Role]]:
        """Yields (parameter name, rows, role) for every part of the weight and of the bias."""
        start = 0
        for part, width in self.parts.items():
            rows = slice(start, start + width)
            yield "weight", rows, Role(self.kind, part)
            if self.bias is not None:
                yield "bias", rows, Role(self.kind, part, bias=True)
            start += width

    def extra_repr(self) -> str:
        return ", ".join(f"{part}: {width}" for part, width in self.parts.items())
