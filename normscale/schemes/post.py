"""Post-Norm: the norm comes after the sum."""

from typing import Any

from torch import Tensor

from normscale.ops.handles import watch_handle
from normscale.ops.statistics import Buffers, Statistics, watch, write_sum
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Scheme, Side, Site, Streams

_EXTRA = "a Post-Norm stream is already normalised after every sum; use scheme=pre for a norm before the branch"


@register("post")
class PostNorm(Scheme):
    """x' = Norm(alpha * x + F(x)), with alpha = 1.

    The stream leaves the last site normalised, so there is no final norm.

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
    """

    sums = True
    refuses = {"pre_norm": _EXTRA, "final_norm": _EXTRA}

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        after = depth.after(site)
        next_alpha = 1.0 if after is None else self.alpha(depth, after)
        return {"norm": make.norm(), "alpha": self.alpha(depth, site), "next_alpha": next_alpha}

    def own_ends(self, depth: Depth, side: Side, make: Make) -> Parts:
        norm: Any = make.norm()
        return {"opening": norm.opening(self.alpha(depth, depth.first(side)))}

    def enter(self, emb: Tensor, ends: Own) -> Streams:
        streams: Streams = ends.module("opening")(emb)
        return streams

    def shown(self, streams: Streams) -> tuple[Tensor, ...]:
        return streams[:1]

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        """Returns the normed sum and, where the opening has made a handle for fused norms, a handle on it."""
        if len(streams) == 1:
            return (own.module("norm").residual(streams[0], out, own.tensor("alpha")),)
        fused: Streams = own.module("norm").residual_handle(*streams, out, own.tensor("next_alpha"))
        return fused

    def write_measured(self, streams: Streams, out: Tensor, own: Own, to: Buffers, index: Tensor) -> Streams:
        """As `Scheme.write_measured`; of what is asked, the kernels have all but the sum and the stream's gradient."""
        y_row, z_row = index[:1], index[1:]
        found = Statistics(to.rows, z_row, y_row)
        norm = own.module("norm")
        if len(streams) == 1:
            y = norm.residual(streams[0], out, own.tensor("alpha"), found)
            written: Streams = (watch(y, to.grad_rows, y_row),)
        else:
            y, handle = norm.residual_handle(*streams, out, own.tensor("next_alpha"), found)
            written = watch_handle(y, handle, to.grad_rows, y_row)
        write_sum(to.sums, y_row, y)
        return written
