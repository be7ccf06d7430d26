"""CogView's LayerNorm, relaxed in precision."""

from typing import Annotated, Literal

from torch import Tensor

from normscale.config.values import says
from normscale.norms.norm import AffineNorm, AffineOptions, divisor, register, wide
from normscale.ops.norm import layernorm


@register("cogview")
class CogViewNorm(AffineNorm):
    """LayerNorm(x / (max|x| / 8)): no square overflows fp16, and nothing is multiplied back.

    LayerNorm does not see the scale, so that but for eps, which counts against x^2 / (max|x| / 8)^2 here, this is
    LayerNorm. The maximum is detached; as in the authors' code it is that of the whole tensor (by which an eps that
    counts is felt from one token to another, and from later ones to earlier), or of each token.

    Reference: Ding et al. 2021, arXiv:2105.13290 (precision bottleneck relaxation); THUDM/CogView,
    `mpu/sparse_transformer.py`.
    """

    class Options(AffineOptions):
        over: Annotated[
            Literal["tensor", "token"],
            says("what the maximum is taken of", "arXiv:2105.13290; tensor in THUDM/CogView"),
        ] = "tensor"

    options: Options

    def eager(self, x: Tensor) -> Tensor:
        x_wide, size = wide(x), wide(x.detach().abs())
        whole = self.options.over == "tensor" and x.numel() > 0  # of no rows there is no maximum
        largest = size.amax() if whole else size.amax(-1, keepdim=True)
        relaxed = x_wide / divisor(largest / 8)
        return layernorm(relaxed, self.gain(), self.bias, self.current_eps()).to(x.dtype)
