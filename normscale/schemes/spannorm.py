"""SpanNorm: Post-Norm whose feed-forward residual is what entered the block."""

from torch import Tensor, nn

from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Site, Streams
from normscale.schemes.spanning import Spanning


@register("spannorm")
class SpanNorm(Spanning):
    """y = Norm(x + Attn(x)), x' = Norm(x + FFN(y)): the second skip starts below attention.

    The first attention reads Norm(x), its skip does not: a second block structure, hence a second compiled graph. There
    is no final norm. The paper combines the graph with a "principled scaling" of the init whose constants we have not
    seen; the gain is 1 here, so that what is measured is the graph alone.

    Reference: Wang et al. 2026, arXiv:2601.22580, Eq. 5-8 (by way of a reimplementation that cites them).
    """

    topologies = frozenset(("encoder", "decoder"))
    refuses = {"final_norm": "a SpanNorm stream is already normalised after every sum"}

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        parts = super().own(depth, site, make)
        first: dict[str, nn.Module] = {"in_norm": make.norm()} if site.index == 0 else {}
        return {**first, **parts}

    def read(self, streams: Streams, own: Own) -> Tensor:
        x: Tensor = own.module("in_norm")(streams[0]) if own.has("in_norm") else streams[0]
        return x

    def last_residual(self, x: Tensor, block_input: Tensor) -> Tensor:
        return block_input
