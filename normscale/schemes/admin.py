"""Admin: Post-Norm whose residual is scaled, for every channel, by what one pass through the fresh model measures."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normscale.schemes.post import PostNorm
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Side, Site, Streams


@register("admin")
class Admin(PostNorm):
    """x' = Norm(omega * x + F(x)), with an omega for every channel that is trained, and set before training.

    The first sublayer of a stack has omega = 1, each later one the standard deviation of the sum of the one before:
    omega_(i+1)^2 = Var(omega_i x_i) + Var(F_i(x_i)), over all entries of a batch. The residual then weighs against a
    branch as it would in a Pre-Norm stream. Until `calibrate`, omega is 1 and this is Post-Norm. Where the batch is
    padded, padding counts as in the release; dropout is drawn too.

    Reference: Liu et al. 2020, arXiv:2004.08249, section 4; LiyuanLucasLiu/Transformer-Clinic,
    `fairseq/fairseq/modules/transformer_layer.py`, init_type "adaptive-profiling", which profiles in one process and
    reads the values back from a file in the next.
    """

    profiling = False
    variance: Tensor  # while profiling: of the sum at the site before

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        return {"norm": make.norm(), "alpha": nn.Parameter(torch.ones(make.width))}

    def own_ends(self, depth: Depth, side: Side, make: Make) -> Parts:
        return {}

    def enter(self, emb: Tensor, ends: Own) -> Streams:
        if self.profiling:
            self.variance = emb.new_ones(())  # every stack begins anew
        return (emb,)

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        if self.profiling:
            omega = own.tensor("alpha").fill_(self.variance.sqrt())
            self.variance = (omega * streams[0]).var(correction=0) + out.var(correction=0)
        return super().write(streams, out, own)

    def calibrate(self, forward: Callable[[], object]) -> None:
        self.profiling = True
        try:
            with torch.compiler.set_stance("force_eager"):  # blocks are compiled once, as they are trained
                forward()
        finally:
            self.profiling = False
