"""Pre-Norm: the norm comes before the branch."""

from torch import Tensor

from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Scheme, Side, Site, Streams


@register("pre")
class PreNorm(Scheme):
    """x' = x + F(Norm(x)), and one norm at the end of the stack.

    The sum and the next norm are two operations, `ops.add_norm` being one for both: the sum is made by `write` of one
    site, the norm by `read` of the next, mostly of another block, and between them the sum is what is measured, what
    checkpointing keeps and what a block is left out of. Fused, the sum would not exist until the next site reads it.

    Reference: Xiong et al. 2020, arXiv:2002.04745, Table 1.
    """

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        return {"norm": make.norm()}

    def own_ends(self, depth: Depth, side: Side, make: Make) -> Parts:
        return {"norm": make.norm()}

    def read(self, streams: Streams, own: Own) -> Tensor:
        x: Tensor = own.module("norm")(streams[0])
        return x

    def exit(self, streams: Streams, ends: Own) -> Tensor:
        x: Tensor = ends.module("norm")(streams[0])
        return x
