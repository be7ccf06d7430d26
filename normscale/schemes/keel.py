"""Keel: Post-Norm with an up-weighted residual, and a norm before the branch as well."""

from typing import Annotated

from torch import Tensor

from normscale.config.values import Positive, Section, says
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Scheme, Site, Streams


@register("keel")
class Keel(Scheme):
    """x' = Norm(alpha * x + F(Norm(x))), with alpha the number of sublayers, 2 L.

    The first attention has neither outer norm nor alpha, x' = x + F(Norm(x)), and the first feed-forward layer no
    alpha. The stream leaves the last site normalised, so there is no final norm. The init is the standard one. Two
    block structures, hence two compiled graphs. The authors' norms have no bias (`model.norm_options.bias=false`).

    Reference: Chen and Wei 2026, arXiv:2601.19895, section 3.
    """

    topologies = frozenset(("encoder", "decoder"))
    refuses = {"final_norm": "a Keel stream is already normalised after every sum but the first"}

    class Options(Section):
        alpha: Annotated[
            Positive | None,
            says(
                "of all residuals but the first two; null: the number of sublayers; tuned, above 1, for small models",
                "arXiv:2601.19895, section 3",
            ),
        ] = None

    options: Options

    def alpha(self, depth: Depth, site: Site) -> float:
        if site.index < 2:
            return 1.0
        return depth.sublayers(site.side) if self.options.alpha is None else self.options.alpha

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        if site.index == 0:
            return {"norm": make.norm()}
        return {"norm": make.norm(), "out_norm": make.norm(), "alpha": self.alpha(depth, site)}

    def read(self, streams: Streams, own: Own) -> Tensor:
        x: Tensor = own.module("norm")(streams[0])
        return x

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        if not own.has("out_norm"):
            return (streams[0] + out,)
        return (own.module("out_norm").residual(streams[0], out, own.tensor("alpha")),)
