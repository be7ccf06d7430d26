"""AdaNorm: a gain that follows from the input, in place of a trained one."""

from typing import Annotated

import torch
from torch import Tensor

from normscale.config.values import Positive, Section, says
from normscale.norms.norm import Norm, register, wide


@register("adanorm")
class AdaNorm(Norm):
    """scale * (1 - k * y) * y with y = (x - mean) / sqrt(var + eps), and no gradient through the factor 1 - k * y.

    Nothing is trained. The authors' code divides by the unbiased deviation with eps outside the root; here both are as
    in LayerNorm.

    Reference: Xu et al. 2019, arXiv:1911.07013, section 4 (k = 1/10, C by the task; here `scale`).
    """

    class Options(Section):
        scale: Annotated[Positive, says("on the whole: C, by the task", "arXiv:1911.07013, section 4")] = 1.0
        k: Annotated[Positive, says("how fast the gain falls with y", "arXiv:1911.07013, section 4 (1/10)")] = 0.1

    options: Options

    def eager(self, x: Tensor) -> Tensor:
        x_wide = wide(x)
        centred = x_wide - x_wide.mean(-1, keepdim=True)
        y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.current_eps())
        factor = self.options.scale * (1.0 - self.options.k * y)
        return (factor.detach() * y).to(x.dtype)
