"""T-Fixup: no norms, and an init by depth in their place."""

from math import pow

from normscale.schemes.registry import register
from normscale.schemes.scheme import SCALED, Depth, Role, Scheme, Site


@register("tfixup")
class TFixup(Scheme):
    """x' = x + F(x), with a smaller init of v, o, in, out and of the token vectors; queries and keys keep gain 1.

    Beside a decoder, encoder blocks have 0.67 N^(-1/4); decoder blocks, cross-attention included, (9M)^(-1/4). Token
    vectors have (9N)^(-1/4): the two sides share them here, and the release takes the encoder's depth for its source
    (layer6ai-labs/T-Fixup, `fairseq/models/transformer.py`). The paper's N is one number for both sides. The gate of a
    gated feed-forward layer and the projection into a latent keep gain 1, as in DeepNorm.

    The paper has no single stack. Its condition, that one SGD step of rate eta moves the output by Theta(eta), is for
    2L sublayers of two matrices of size s, on a stream of size u: L * 4 * s^2 * u^2 = 1, which is the s = 1 /
    (2 u sqrt(L)) of Xu et al. 2021. With embeddings as small as weights, u = s as in T-Fixup's decoder, both have
    (4L)^(-1/4). This row is derived, and not published.

    The authors train with Adam, without warm-up, from Xavier's init (`model.init`).

    Reference: Huang et al. 2020, Improving Transformer Optimization Through Better Initialization (ICML), section 3.2;
    Xu et al. 2021, arXiv:2012.15355 (DT-Fixup), section 3.
    """

    has_norms = False

    def beta(self, depth: Depth, site: Site) -> float:
        if depth.topology != "encoder-decoder":
            return pow(4 * depth.single, -1 / 4)
        return 0.67 * pow(depth.N, -1 / 4) if site.side == "encoder" else pow(9 * depth.M, -1 / 4)

    def gain(self, depth: Depth, site: Site | None, role: Role) -> float:
        if site is not None:
            return self.beta(depth, site) if role.part in SCALED else 1.0
        if role.part != "token":
            return 1.0
        return pow(9 * depth.N, -1 / 4) if depth.topology == "encoder-decoder" else pow(4 * depth.single, -1 / 4)
