"""pRMSNorm: RMSNorm by the first of the channels."""

import math
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from normscale.config.values import Number, says
from normscale.norms.norm import AffineNorm, GainOptions, register, wide


@register("prmsnorm")
class PartialRMSNorm(AffineNorm):
    """gamma * x / sqrt(mean(x_1^2 .. x_k^2) + eps), with k = ceil(share * D): an estimate of the RMS by k channels.

    Reference: Zhang and Sennrich 2019, arXiv:1910.07467, section 5 (pRMSNorm; 6.25 % of the channels in its tables).
    """

    class Options(GainOptions):
        share: Annotated[
            Annotated[Number, Field(gt=0, le=1)],
            says("of the channels, from the first, that the RMS is taken from", "arXiv:1910.07467, section 5 (6.25 %)"),
        ] = 0.0625

    options: Options

    def eager(self, x: Tensor) -> Tensor:
        x_wide = wide(x)
        first = x_wide[..., : math.ceil(self.options.share * self.width)]
        return self.affine(x_wide * torch.rsqrt(first.square().mean(-1, keepdim=True) + self.current_eps()), x.dtype)
