"""LayerNorm-Scaling: Pre-Norm whose norms are divided by the root of the block's number."""

from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.schemes.pre import PreNorm
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Site, Streams


@register("lns")
class LayerNormScaling(PreNorm):
    """x' = x + F(Norm(x) / sqrt(l)) in block l = 1 .. L, the same for both sublayers; one unscaled norm at the end.

    The authors warn of a scaled init beside it: both would shrink the branches of deep blocks.

    Reference: Sun et al. 2025, arXiv:2502.05795, section 4; `LayerNormScaledTransformerBlock` of
    allenai/OLMo-core. In the authors' own release (lmsdss/LayerNorm-Scaling) no setting reaches the scaled branch.
    """

    topologies = frozenset(("encoder", "decoder"))

    def clash(self, config: ModelConfig) -> tuple[str, str] | None:
        if config.init_scaled not in (False, "none"):
            return "init_scaled", "it makes branches smaller with depth itself; remove one of them"
        return None

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        return {"norm": make.norm(), "scale": (site.block + 1) ** -0.5}

    def read(self, streams: Streams, own: Own) -> Tensor:
        return super().read(streams, own) * own.tensor("scale")
