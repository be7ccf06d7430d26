"""DyT: a squashing function in the place of a norm."""

from typing import Annotated

import torch
from torch import Tensor, nn

from normscale.config.values import Positive, says
from normscale.norms.norm import AffineNorm, AffineOptions, register, wide


@register("dyt")
class DyT(AffineNorm):
    """gamma * tanh(alpha_tanh * x) + bias, with one trained alpha_tanh for all channels.

    It takes no statistics: each value goes its own way, shifts and scales of the input show in the output, and there
    is no eps. The authors start at 0.5; for language models they give other values by width and by branch.

    Reference: Zhu et al. 2025, arXiv:2503.10622, section 4.
    """

    has_eps = False

    class Options(AffineOptions):
        alpha_tanh: Annotated[Positive, says("where it starts", "arXiv:2503.10622, section 4 (0.5)")] = 0.5

    def __init__(self, width: int, eps: float, options: Options) -> None:
        super().__init__(width, eps, options)
        self.alpha_tanh = nn.Parameter(torch.tensor([options.alpha_tanh]))  # [1]: FSDP2 shards no 0-d one

    def eager(self, x: Tensor) -> Tensor:
        return self.affine(torch.tanh(wide(x) * self.alpha_tanh), x.dtype)
