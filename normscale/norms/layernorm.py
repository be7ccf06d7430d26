"""LayerNorm."""

import torch
from torch import Tensor, nn

from normscale.config.values import Flag, Section
from normscale.norms.norm import Norm, register
from normscale.ops.norm import layernorm


@register("layernorm")
class LayerNorm(Norm):
    """gamma * (x - mean) / sqrt(var + eps) + bias.

    Reference: Ba et al. 2016, arXiv:1607.06450, Eq. 3-4.
    """

    class Options(Section):
        gain: Flag = True  # false: gamma is 1 and not trained
        bias: Flag = True  # false: the bias is 0 and not trained

    gamma: Tensor | None
    bias: Tensor | None

    def __init__(self, width: int, eps: float, options: Options) -> None:
        super().__init__(width, eps, options)
        self.gamma = nn.Parameter(torch.ones(width)) if options.gain else None
        self.bias = nn.Parameter(torch.zeros(width)) if options.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return layernorm(x, self.gamma, self.bias, self.current_eps())
