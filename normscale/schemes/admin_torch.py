"""Admin without its profiling pass: the residual's multiplier from the number of sublayers alone."""

from math import log, sqrt
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from normscale.config.values import Flag, Section, says
from normscale.schemes.post import PostNorm
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Side, Site, Streams

Change = Literal["n", "log", "1"]


@register("admin-torch")
class AdminTorch(PostNorm):
    """x' = Norm(omega x + F(x)), with an omega that is the same at every site of a stack of n sublayers.

    `change` is how the output's change grows with n where every weight is changed at random: "log" has
    omega = sqrt((n + 1) / ln(n + 1) - 1), "1" has sqrt(n), and "n" has 1, which is Post-Norm. Where there are two
    stacks, each counts its own sublayers, 2N and 3M. A constant omega (`trained: false`, theirs `as_module`) shares
    Post-Norm's fused backward; a trained one (`as_parameter`) is a vector with an entry for every channel.

    Reference: Liu et al. 2020, arXiv:2004.08249, Theorem 2; microsoft/admin-torch,
    `admin_torch/admin.py`, calculate_init.
    """

    class Options(Section):
        change: Annotated[
            Change,
            says(
                "how the output's change grows with the number of sublayers",
                "arXiv:2004.08249, Theorem 2; calculate_init of microsoft/admin-torch",
            ),
        ] = "log"
        trained: Annotated[
            Flag, says("omega is a trained vector, and no constant", "as_parameter of microsoft/admin-torch")
        ] = False

    options: Options

    def alpha(self, depth: Depth, site: Site) -> float:
        n = depth.sublayers(site.side)
        return {"n": 1.0, "log": sqrt((n + 1) / log(n + 1) - 1), "1": sqrt(n)}[self.options.change]

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        if not self.options.trained:
            return super().own(depth, site, make)
        return {"norm": make.norm(), "alpha": nn.Parameter(torch.full((make.width,), self.alpha(depth, site)))}

    def own_ends(self, depth: Depth, side: Side, make: Make) -> Parts:
        return {} if self.options.trained else super().own_ends(depth, side, make)

    def enter(self, emb: Tensor, ends: Own) -> Streams:
        # A handle knows no gradient of alpha: a trained one goes without.
        return (emb,) if self.options.trained else super().enter(emb, ends)
