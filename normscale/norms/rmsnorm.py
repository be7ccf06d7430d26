"""RMSNorm."""

import torch
from torch import Tensor, nn

from normscale.config.schema import Flag, Section
from normscale.norms.norm import Norm, register
from normscale.ops.norm import rmsnorm


@register("rmsnorm")
class RMSNorm(Norm):
    """gamma * x / sqrt(mean(x^2) + eps).

    Reference: Zhang and Sennrich 2019, arXiv:1910.07467, Eq. 4.
    """

    class Options(Section):
        gain: Flag = True  # false: gamma is 1 and not trained

    gamma: Tensor | None

    def __init__(self, width: int, eps: float, options: Options) -> None:
        super().__init__(width, eps, options)
        self.gamma = nn.Parameter(torch.ones(width)) if options.gain else None

    def forward(self, x: Tensor) -> Tensor:
        return rmsnorm(x, self.gamma, self.current_eps())
