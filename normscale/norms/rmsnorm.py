"""RMSNorm."""

import torch
from torch import Tensor, nn

from normscale.norms.norm import Norm, register
from normscale.ops.norm import rmsnorm


@register("rmsnorm")
class RMSNorm(Norm):
    """gamma * x / sqrt(mean(x^2) + eps).

    Reference: Zhang and Sennrich 2019, arXiv:1910.07467, Eq. 4.
    """

    gamma: Tensor

    def __init__(self, width: int, eps: float, options: Norm.Options) -> None:
        super().__init__(width, eps, options)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rmsnorm(x, self.gamma, self.current_eps())
