"""Pre-Norm: the norm comes before the branch."""

from typing import Annotated

from torch import Tensor, nn

from normscale.config.values import Flag, Section, says
from normscale.ops.residual import added
from normscale.ops.statistics import Buffers, Statistics, write_sum
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Scheme, Side, Site, Streams


@register("pre")
class PreNorm(Scheme):
    """x' = x + F(Norm(x)), and one norm at the end of the stack unless `final_norm` is false.

    Where norms are fused, `write` makes the sum and the norm that the next site sees it through in one kernel
    (`ops.add_norm`), and carries the latter beside the stream: 8 passes over the activation in place of 11. A site
    that finds nothing carried makes its norm itself: on the eager path, where a block was left out, and at the border
    of blocks that are on their own (see `Transformer.join_blocks`).

    Reference: Xiong et al. 2020, arXiv:2002.04745, Table 1.
    """

    class Options(Section):
        final_norm: Annotated[
            Flag,
            says("false: the stream leaves as the last site has left it", "arXiv:2002.04745, Table 1 (with the norm)"),
        ] = True

    options: Options

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        return {"norm": make.norm()}

    def own_ends(self, depth: Depth, side: Side, make: Make) -> Parts:
        return {"norm": make.norm()} if self.options.final_norm else {}

    def enter(self, emb: Tensor, ends: Own) -> Streams:
        """Returns the stream, with its norm where the sites carry one: one compiled graph then serves all blocks."""
        return (emb,) if ends.after is None else ends.after.beside(emb)

    def shown(self, streams: Streams) -> tuple[Tensor, ...]:
        return streams[:1]

    def seen_through(self, own: Own) -> nn.Module | None:
        norm: nn.Module | None = own.module("norm") if own.has("norm") else None
        return norm

    def read(self, streams: Streams, own: Own) -> Tensor:
        return _normed(streams, own)

    def write(self, streams: Streams, out: Tensor, own: Own, statistics: Statistics | None = None) -> Streams:
        """Returns the sum and, where one kernel makes both, its norm; z of the statistics is the sum."""
        if own.after is None:
            return (added(streams[0], out, statistics),)
        written: Streams = own.after.add(streams[0], out, statistics)
        return written

    def write_measured(self, streams: Streams, out: Tensor, own: Own, to: Buffers, index: Tensor) -> Streams:
        """As `Scheme.write_measured`: the kernels measure the stream and its gradient, which is made in them alone."""
        row = index[:1]
        written = self.write(streams, out, own, Statistics(to.rows, z=row, grad_rows=to.grad_rows, dz=row))
        write_sum(to.sums, row, written[0])
        return written

    def exit(self, streams: Streams, ends: Own) -> Tensor:
        x: Tensor = _normed(streams, ends) if ends.has("norm") else streams[0]
        return x


def _normed(streams: Streams, own: Own) -> Tensor:
    x: Tensor = own.module("norm")(streams[0]) if len(streams) == 1 else streams[1]
    return x
