"""Mix-LN: Post-Norm in the first blocks, Pre-Norm in the others."""

from math import floor
from typing import Annotated

from pydantic import Field
from torch import Tensor

from normscale.config.values import Number, Section, says
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Scheme, Side, Site, Streams


@register("mixln")
class MixLN(Scheme):
    """x' = Norm(x + F(x)) in the first floor(share * L) of L blocks, x' = x + F(Norm(x)) in the others.

    One norm at the end of the stack, unless every block is Post-Norm. Two block structures, hence two compiled graphs.
    A share above 0 is one block at least, where the paper's formula would give none (L < 4 at a share of 0.25).

    Reference: Li et al. 2024, arXiv:2412.13795 (share 0.25; the published runs have 3 of 12 and 6 of 24).
    """

    topologies = frozenset(("encoder", "decoder"))
    refuses = {"final_norm": "it follows from share: there is one unless every block is Post-Norm"}

    class Options(Section):
        share: Annotated[
            Annotated[Number, Field(ge=0, le=1)],
            says("of the blocks, from the bottom, that are Post-Norm", "arXiv:2412.13795 (0.25)"),
        ] = 0.25

    options: Options

    def post_blocks(self, depth: Depth) -> int:
        """Returns the number of Post-Norm blocks."""
        share = self.options.share
        below = floor(share * depth.single + 1e-9)  # 0.29 * 100 is 28.999... in binary
        return max(below, 1) if share > 0 else 0

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        post = site.block < self.post_blocks(depth)
        return {"norm": make.norm(), "alpha": 1.0} if post else {"norm": make.norm()}

    def own_ends(self, depth: Depth, side: Side, make: Make) -> Parts:
        return {"norm": make.norm()} if self.post_blocks(depth) < depth.single else {}

    def read(self, streams: Streams, own: Own) -> Tensor:
        x: Tensor = streams[0] if own.has("alpha") else own.module("norm")(streams[0])
        return x

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        if own.has("alpha"):
            return (own.module("norm").residual(streams[0], out, own.tensor("alpha")),)
        return (streams[0] + out,)
