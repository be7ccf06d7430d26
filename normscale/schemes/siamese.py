"""SiameseNorm: a Post-Norm and a Pre-Norm stream, both of which every branch sees."""

from math import sqrt
from typing import Annotated, Literal

from torch import Tensor

from normscale.config.values import Flag, Section, says
from normscale.schemes.registry import register
from normscale.schemes.residual import TwoStreams
from normscale.schemes.scheme import Depth, Make, Own, Parts, Side, Site, Streams

_SOURCE = "arXiv:2602.08064, section 3; Qwen-Applications/SiameseNorm"


@register("siamese")
class SiameseNorm(TwoStreams):
    """O = F(Norm(X + Norm(Y))), X' = Norm(X + O / c), Y' = Y + O; out = X + Norm(Y), both streams being x_0 at first.

    X' is made as Norm(c X + O), in one kernel: the same with an eps smaller by c^2.

    The release writes the norm of X at the head of a block and not at the end of the one before. Its streams are
    these, but X starts as Norm(x_0), and a norm of the output follows: `form` says which. Its other kind of attention
    ("hybrid": q, k and v are normed, X is not) is not built here. The paper and its release show decoders and
    encoders, no stack of both.

    Reference: Li et al. 2026, arXiv:2602.08064, section 3 (the paper's factor is second-hand); the release is
    Qwen-Applications/SiameseNorm, `OLMo_model_hybrid_pre.py` and `deit-model-siamesenorm.py`.
    """

    topologies = frozenset(("encoder", "decoder"))
    refuses = {"final_norm": "the norm of Y at the end is part of it; form=release has one more, of the output"}

    class Options(Section):
        """Where the paper and its release differ, and the parts that both call auxiliary.

        factor: c of block l, counted from 0. paper: sqrt(l + 1); release: sqrt(2 (l + 1)); none: 1.
        """

        form: Annotated[
            Literal["paper", "release"],
            says("release: X starts as Norm(x_0), and a norm of the output follows", _SOURCE),
        ] = "paper"
        factor: Annotated[Literal["paper", "release", "none"], says("c, what divides O in X", _SOURCE)] = "paper"
        input_norm: Annotated[Flag, says("false: a branch sees X + Norm(Y) as it is", _SOURCE)] = True

    options: Options

    def alpha(self, depth: Depth, site: Site) -> float:
        return {"paper": sqrt(site.block + 1), "release": sqrt(2 * (site.block + 1)), "none": 1.0}[self.options.factor]

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        optional = {"in_norm": make.norm()} if self.options.input_norm else {}
        return {"norm": make.norm(), "y_norm": make.norm(), **optional, "alpha": self.alpha(depth, site), "scale": 1.0}

    def own_ends(self, depth: Depth, side: Side, make: Make) -> Parts:
        release = {"x_norm": make.norm(), "out_norm": make.norm()} if self.options.form == "release" else {}
        return {"y_norm": make.norm(), **release}

    def enter(self, emb: Tensor, ends: Own) -> Streams:
        return ends.module("x_norm")(emb) if ends.has("x_norm") else emb, emb.clone()

    def read(self, streams: Streams, own: Own) -> Tensor:
        x, y = streams
        both: Tensor = x + own.module("y_norm")(y)
        return own.module("in_norm")(both) if own.has("in_norm") else both

    def exit(self, streams: Streams, ends: Own) -> Tensor:
        x, y = streams
        both: Tensor = x + ends.module("y_norm")(y)
        return ends.module("out_norm")(both) if ends.has("out_norm") else both
