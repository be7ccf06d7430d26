"""Peri-Norm: a norm before the branch and another after it."""

from torch import Tensor

from normscale.ops.statistics import Statistics
from normscale.schemes.pre import PreNorm
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Site, Streams


@register("peri")
class PeriNorm(PreNorm):
    """x' = x + Norm(F(Norm(x))), and one norm at the end of the stack; Gemma 2 and 3 are built so.

    The norm of the embedding that some of these models have is `model.embedding_norm`. Beside an encoder all three
    kinds of sublayer are built so, as in T5Gemma.

    Reference: Kim et al. 2025, arXiv:2502.02732, section 3 (Peri-LN); the same graph as the Sandwich-LN of Ding et
    al. 2021, arXiv:2105.13290. Zhang et al. 2025, arXiv:2504.06225 (T5Gemma).
    """

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        return {"norm": make.norm(), "out_norm": make.norm()}

    def write(self, streams: Streams, out: Tensor, own: Own, statistics: Statistics | None = None) -> Streams:
        return super().write(streams, own.module("out_norm")(out), own, statistics)
