"""ReZero: every branch begins at nothing."""

from typing import Annotated

import torch
from torch import Tensor, nn

from normscale.config.values import Number, Section, says
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Scheme, Site, Streams


@register("rezero")
class ReZero(Scheme):
    """x' = x + a * F(x), with one trained number a at every site, 0 at first, and no norms.

    A fresh model is the identity between embedding and head: at first only the numbers and the ends have gradients.
    Nothing follows from the depth, so that every topology is one of its.

    Reference: Bachlechner et al. 2020, arXiv:2003.04887, Eq. 1 and section 4 (Transformers without norm and warm-up).
    """

    has_norms = False

    class Options(Section):
        start: Annotated[
            Number, says("what the multiplier of every branch begins at", "arXiv:2003.04887, Eq. 1 (0)")
        ] = 0.0

    options: Options

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        return {"a": nn.Parameter(torch.tensor([self.options.start]))}  # [1]: FSDP2 shards no 0-d one

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        return (streams[0] + (own.tensor("a") * out).to(streams[0].dtype),)
