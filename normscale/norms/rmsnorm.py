"""RMSNorm."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from normscale.config.values import says
from normscale.norms.norm import AffineNorm, GainOptions, register, wide
from normscale.ops.norm import rmsnorm
from normscale.ops.spec import NormSpec


@register("rmsnorm")
class RMSNorm(AffineNorm):
    """gamma * x / sqrt(mean(x^2) + eps); with eps outside the root, / (sqrt(mean(x^2)) + eps).

    The authors' own code has it outside (bzhangGo/rmsnorm, `rmsnorm_torch.py`), almost every later model inside.
    Outside, eps is in units of x and not of x squared, and no kernel has the form.

    Reference: Zhang and Sennrich 2019, arXiv:1910.07467, Eq. 4.
    """

    class Options(GainOptions):
        eps_place: Annotated[
            Literal["inside", "outside"],
            says("where eps is added, of the root", "outside in the code of arXiv:1910.07467, inside in most models"),
        ] = "inside"

    options: Options

    def __init__(self, width: int, eps: float, options: Options) -> None:
        super().__init__(width, eps, options)
        if options.eps_place == "inside":
            self.spec = NormSpec("rmsnorm", eps, options.zero_centred)

    def eager(self, x: Tensor) -> Tensor:
        if self.spec is not None:
            return rmsnorm(x, self.gain(), self.current_eps())
        x_wide = wide(x)
        # The norm's gradient at 0 is 0; that of a root of squares would make a row of zeros NaN.
        rms = torch.linalg.vector_norm(x_wide, dim=-1, keepdim=True) / self.width**0.5
        return self.affine(x_wide / (rms + self.current_eps()), x.dtype)
