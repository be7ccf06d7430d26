"""LayerNorm."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from normscale.config.values import says
from normscale.norms.norm import AffineNorm, AffineOptions, register, wide
from normscale.ops.norm import layernorm
from normscale.ops.spec import NormSpec


@register("layernorm")
class LayerNorm(AffineNorm):
    """gamma * (x - mean) / sqrt(var + eps) + bias; with eps outside the root, / (sqrt(var) + eps).

    Outside, eps is in units of x and not of x squared, and no kernel has the form.

    Reference: Ba et al. 2016, arXiv:1607.06450, Eq. 3-4.
    """

    class Options(AffineOptions):
        eps_place: Annotated[
            Literal["inside", "outside"],
            says("where eps is added, of the root", "inside in torch.nn.LayerNorm; outside in articles"),
        ] = "inside"

    options: Options

    def __init__(self, width: int, eps: float, options: Options) -> None:
        super().__init__(width, eps, options)
        if options.eps_place == "inside":
            self.spec = NormSpec("layernorm", eps, options.zero_centred)

    def eager(self, x: Tensor) -> Tensor:
        if self.spec is not None:
            return layernorm(x, self.gain(), self.bias, self.current_eps())
        centred = wide(x)
        centred = centred - centred.mean(-1, keepdim=True)
        # The norm's gradient at 0 is 0; that of a root of squares would make a constant row NaN.
        deviation = torch.linalg.vector_norm(centred, dim=-1, keepdim=True) / self.width**0.5
        return self.affine(centred / (deviation + self.current_eps()), x.dtype)
