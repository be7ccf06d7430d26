"""The layer that an article calls a stable LayerNorm, and that normalises nothing."""

import torch
from torch import Tensor

from normscale.norms.norm import AffineNorm, GainOptions, divisor, register, wide


@register("maxnorm")
class MaxNorm(AffineNorm):
    """Divides by m = max|x| of the token, divides by the deviation, and multiplies m back.

    What it computes is gamma * x * m / sqrt(var + eps * m^2): an input c times as large gives an output c times as
    large, so it is no normaliser. Nothing is centred either, and there is no bias. It is here for the claim to be
    tested; what keeps squares from overflowing without undoing the norm is `cogview`.

    Reference: none but the article's own code, where it is called StableLayerNorm. var is the population variance.
    """

    class Options(GainOptions):
        pass

    def eager(self, x: Tensor) -> Tensor:
        x_wide = wide(x)
        largest = divisor(x_wide.abs().amax(-1, keepdim=True))
        y = x_wide / largest
        deviation = torch.sqrt(y.var(-1, correction=0, keepdim=True) + self.current_eps())
        return self.affine(y / deviation * largest, x.dtype)
