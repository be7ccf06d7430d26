"""LayerNorm."""

import torch
from torch import Tensor, nn

from normscale.config.values import Flag, Section
from normscale.norms.norm import Norm, register
from normscale.ops.norm import layernorm
from normscale.ops.spec import NormSpec


@register("layernorm")
class LayerNorm(Norm):
    """gamma * (x - mean) / sqrt(var + eps) + bias.

    Reference: Ba et al. 2016, arXiv:1607.06450, Eq. 3-4.
    """

    class Options(Section):
        gain: Flag = True  # false: gamma is 1 and not trained
        bias: Flag = True  # false: the bias is 0 and not trained

    def __init__(self, width: int, eps: float, options: Options) -> None:
        super().__init__(width, eps, options)
        self.spec = NormSpec("layernorm", eps)
        self.gamma = nn.Parameter(torch.ones(width)) if options.gain else None
        self.bias = nn.Parameter(torch.zeros(width)) if options.bias else None

    def forward(self, x: Tensor) -> Tensor:
        if (self.backend != "auto" or not x.is_cpu) and (backend := self.backend_for(x)) != "eager":
            return self.run(backend, x)
        return layernorm(x, self.gamma, self.bias, self.current_eps())
