"""Derf: the error function in the place of a norm."""

from typing import Annotated

import torch
from torch import Tensor, nn

from normscale.config.values import Number, Positive, says
from normscale.norms.norm import AffineNorm, AffineOptions, register, wide


@register("derf")
class Derf(AffineNorm):
    """gamma * erf(alpha_erf * x + shift) + bias, with one trained alpha_erf and one shift for all channels.

    It takes no statistics, as DyT, and has no eps.

    Reference: Chen et al. 2025, arXiv:2512.10938, abstract (the function); where it starts is as for DyT.
    """

    has_eps = False

    class Options(AffineOptions):
        alpha_erf: Annotated[Positive, says("where it starts", "arXiv:2512.10938; the value is DyT's")] = 0.5
        shift: Annotated[Number, says("where it starts", "arXiv:2512.10938; the value is ours")] = 0.0

    def __init__(self, width: int, eps: float, options: Options) -> None:
        super().__init__(width, eps, options)
        self.alpha_erf = nn.Parameter(torch.tensor([options.alpha_erf]))  # [1]: FSDP2 shards no 0-d one
        self.shift = nn.Parameter(torch.tensor([options.shift]))

    def eager(self, x: Tensor) -> Tensor:
        return self.affine(torch.erf(wide(x) * self.alpha_erf + self.shift), x.dtype)
