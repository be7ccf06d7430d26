"""ResiDual: a Post-Norm stream and, beside it, a plain sum of all branches."""

from typing import Annotated

from torch import Tensor

from normscale.config.values import Number, Positive, Section, says
from normscale.ops.statistics import Buffers, Statistics, watch, write_row, write_sum
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Scheme, Side, Site, Streams


class TwoStreams(Scheme):
    """A Post-Norm stream X and a plain one Y that take in the same branch: X' = Norm(alpha X + O), Y' = Y + scale O.

    A site owns `norm`, `alpha` and `scale`.
    """

    sums = True

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        x, y = streams
        return own.module("norm").residual(x, out, own.tensor("alpha")), y + own.tensor("scale") * out

    def write_measured(self, streams: Streams, out: Tensor, own: Own, to: Buffers, index: Tensor) -> Streams:
        """As `Scheme.write_measured`; z is the sum that X is the norm of."""
        x_row, y_row, z_row = index[:1], index[1:2], index[2:]
        x, y = streams
        x = own.module("norm").residual(x, out, own.tensor("alpha"), Statistics(to.rows, z_row, x_row))
        y = y + own.tensor("scale") * out
        write_row(to.rows, y_row, y)
        for row, stream in ((x_row, x), (y_row, y)):
            write_sum(to.sums, row, stream)
        return watch(x, to.grad_rows, x_row), watch(y, to.grad_rows, y_row)


@register("residual")
class ResiDual(TwoStreams):
    """x' = Norm(x + F(x)) and r' = r + s F(x), with r_0 = s x_0; out = a x + Norm(r).

    Branches see x alone. Both streams are normalised at the end, so that s changes no number but by eps, in exact
    arithmetic: it keeps r within the range of a narrow dtype. The release has an s and an a for each side and an eps
    of 1e-7 in the last norm; here both sides share them, and eps is the model's.

    Reference: Xie et al. 2023, arXiv:2304.14802, section 3; s and a are `res_input_norm_scale` and `alpha` of
    microsoft/ResiDual (`resi_dual/resi_dual.py`, `resi_dual_layers.py`).
    """

    refuses = {"final_norm": "the norm of the plain stream at the end is part of it"}

    class Options(Section):
        s: Annotated[
            Positive,
            says(
                "on everything that goes into r; smaller for a narrow dtype",
                "arXiv:2304.14802; res_input_norm_scale of microsoft/ResiDual",
            ),
        ] = 1.0
        a: Annotated[
            Number,
            says(
                "on the Post-Norm stream in the output; 0: what Pre-Norm puts out",
                "arXiv:2304.14802, section 3 (1); alpha of microsoft/ResiDual",
            ),
        ] = 1.0

    options: Options

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        return {"norm": make.norm(), "alpha": 1.0, "scale": self.options.s}

    def own_ends(self, depth: Depth, side: Side, make: Make) -> Parts:
        return {"norm": make.norm(), "s": self.options.s, "a": self.options.a}

    def enter(self, emb: Tensor, ends: Own) -> Streams:
        return emb, ends.tensor("s") * emb

    def exit(self, streams: Streams, ends: Own) -> Tensor:
        x, r = streams
        out: Tensor = ends.tensor("a") * x + ends.module("norm")(r)
        return out
