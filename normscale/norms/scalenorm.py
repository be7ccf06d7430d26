"""ScaleNorm: every vector gets one and the same length."""

import math
from typing import Annotated

import torch
from torch import Tensor, nn

from normscale.config.values import Flag, Positive, Section, says
from normscale.norms.norm import Norm, register, wide


@register("scalenorm")
class ScaleNorm(Norm):
    """g * x / ||x||, with one trained length g for all channels, sqrt(D) at first.

    Written (g / sqrt(D)) * x / sqrt(mean(x^2) + eps), so that eps means what it does in RMSNorm; the authors' code
    clamps the norm from below instead. With `gain: false` and the length 1 it is the plain L2 norm.

    Reference: Nguyen and Salazar 2019, arXiv:1910.05895, section 2.2.
    """

    class Options(Section):
        gain: Annotated[
            Flag, says("false: the length stays what it is at first", "arXiv:1910.05895, section 2.2 (trained)")
        ] = True
        length: Annotated[
            Positive | None, says("of the output at first; null: sqrt(width)", "arXiv:1910.05895, section 2.2")
        ] = None

    options: Options
    length: Tensor

    def __init__(self, width: int, eps: float, options: Options) -> None:
        super().__init__(width, eps, options)
        start = torch.tensor([math.sqrt(width) if options.length is None else options.length])
        if options.gain:
            self.length = nn.Parameter(start)  # [1] and not 0-d, which FSDP2 does not shard
        else:
            self.register_buffer("length", start, persistent=False)

    def eager(self, x: Tensor) -> Tensor:
        x_wide = wide(x)
        unit = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + self.current_eps())
        return (unit * (self.length / math.sqrt(self.width))).to(x.dtype)
