"""Post-Norm: the norm comes after the sum."""

from torch import Tensor

from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Scheme, Site, Streams

_EXTRA = "a Post-Norm stream is already normalised after every sum; use scheme=pre for a norm before the branch"


@register("post")
class PostNorm(Scheme):
    """x' = Norm(alpha * x + F(x)), with alpha = 1.

    The stream leaves the last site normalised, so there is no final norm.

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
    """

    refuses = {"pre_norm": _EXTRA, "final_norm": _EXTRA}

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        return {"norm": make.norm(), "alpha": self.alpha(depth, site)}

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        x: Tensor = own.module("norm").residual(streams[0], out, own.tensor("alpha"))
        return (x,)
