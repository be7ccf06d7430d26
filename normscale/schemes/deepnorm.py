"""DeepNorm."""

from math import pow

from normscale.schemes.post import PostNorm
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Role, Site


@register("deepnorm")
class DeepNorm(PostNorm):
    """x' = Norm(alpha * x + F(x)) with alpha > 1, and a smaller init of what writes into the stream.

    The gain beta goes to the feed-forward weights, the value and the output projections, of self- and
    cross-attention alike; queries and keys keep gain 1. The paper has no gated feed-forward; as in torchscale the
    gate keeps gain 1, so that the branch of a gated layer shrinks by beta^2, as that of a plain one does.

    Reference: Wang et al. 2022, arXiv:2203.00555, Figure 2 (alpha and beta by architecture).
    """

    def alpha(self, depth: Depth, site: Site) -> float:
        if depth.topology != "encoder-decoder":
            return pow(2 * depth.single, 1 / 4)
        return 0.81 * pow(depth.N**4 * depth.M, 1 / 16) if site.side == "encoder" else pow(3 * depth.M, 1 / 4)

    def beta(self, depth: Depth, site: Site) -> float:
        if depth.topology != "encoder-decoder":
            return pow(8 * depth.single, -1 / 4)
        return 0.87 * pow(depth.N**4 * depth.M, -1 / 16) if site.side == "encoder" else pow(12 * depth.M, -1 / 4)

    def gain(self, depth: Depth, site: Site | None, role: Role) -> float:
        return self.beta(depth, site) if site is not None and role.part in ("v", "o", "in", "out") else 1.0
