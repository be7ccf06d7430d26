"""Reordered norm: the norm comes after the branch, before the sum."""

from typing import Annotated

from torch import Tensor

from normscale.config.values import Flag, Section, says
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Scheme, Side, Site, Streams


@register("reordered")
class ReorderedNorm(Scheme):
    """x' = x + Norm(F(x)), and one norm at the end of the stack unless `final_norm` is false; OLMo 2 is built so.

    The branch sees the stream as it is: what keeps attention in bounds there is `model.qk_norm=full`. Its authors have
    a decoder; an encoder alone is the same stack, and an encoder beside a decoder is nowhere defined.

    Reference: OLMo 2, arXiv:2501.00656, section 2.1.
    """

    topologies = frozenset(("decoder", "encoder"))

    class Options(Section):
        final_norm: Annotated[
            Flag,
            says("false: the stream leaves as the last site has left it", "arXiv:2501.00656 (with the norm)"),
        ] = True

    options: Options

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        return {"norm": make.norm()}

    def own_ends(self, depth: Depth, side: Side, make: Make) -> Parts:
        return {"norm": make.norm()} if self.options.final_norm else {}

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        return (streams[0] + own.module("norm")(out),)
