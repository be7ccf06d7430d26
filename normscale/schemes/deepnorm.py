"""DeepNorm, as the paper has it and as it was published elsewhere."""

from math import pow, sqrt
from typing import Annotated, Literal

from normscale.config.values import Section, says
from normscale.schemes.post import PostNorm
from normscale.schemes.registry import register
from normscale.schemes.scheme import SCALED, Depth, Role, Site

Constants = Literal["paper", "torchscale", "mixln", "keel", "article"]


@register("deepnorm")
class DeepNorm(PostNorm):
    """x' = Norm(alpha * x + F(x)) with alpha > 1, and a smaller init of what writes into the stream.

    The gain beta goes to the feed-forward weights, the value and the output projections, of self- and
    cross-attention alike; queries and keys keep gain 1. The paper has no gated feed-forward; as in torchscale the
    gate keeps gain 1, so that the branch of a gated layer shrinks by beta^2, as that of a plain one does. Nor has it
    a latent that k and v are made from: the projection into it keeps gain 1, since the norm after it takes a gain out
    again (the branch would be no smaller, and only more sensitive to those weights, by 1/beta).

    Reference: Wang et al. 2022, arXiv:2203.00555, Figure 2 (alpha and beta by architecture).
    """

    class Options(Section):
        """Constants that others published under the same name, and one leg of the scheme without the other.

        paper: Figure 2.
        torchscale: the encoder beside a decoder has the gain 1.15 (N^4 M)^(-1/16), where the paper has 0.87; all else
            as the paper (`architecture/encoder.py` of microsoft/torchscale).
        mixln: gain (8N)^(+1/4), the exponent's sign inverted, and the alpha of 32 blocks at every depth (`deeppost` in
            `peft_pretraining/modeling_llama.py` of pixeli99/MixLN and lmsdss/LayerNorm-Scaling).
        keel: gain (2N)^(-1/4), alpha as the paper (arXiv:2601.19895, section 2.3).
        article: what a widely read article gives for two stacks, alpha (2N)^(1/4) in the encoder and (16 N M^2)^(1/16)
            in the decoder. Of beta it only says that it is "reduced accordingly", read here as 1 / (sqrt(2) alpha),
            the ratio that every row of the paper's table has. Its single stacks are the paper's.
        """

        constants: Annotated[
            Constants, says("whose alpha and beta, of those above", "arXiv:2203.00555, Figure 2 (paper)")
        ] = "paper"
        use: Annotated[
            Literal["both", "alpha", "beta"],
            says("alpha: beta is 1; beta: alpha is 1", "both legs: arXiv:2203.00555, section 4.3"),
        ] = "both"

    options: Options

    def unfit(self, depth: Depth) -> tuple[str, str] | None:
        constants = self.options.constants
        if constants in ("mixln", "keel") and depth.topology == "encoder-decoder":
            said = f"{constants!r} gives constants for a single stack only, not for N={depth.N} M={depth.M}"
            return "constants", f"{said}; use paper, torchscale or article, or set model.N=0"
        return None

    def alpha(self, depth: Depth, site: Site) -> float:
        return self._alpha(depth, site) if self.options.use != "beta" else 1.0

    def beta(self, depth: Depth, site: Site) -> float:
        return self._beta(depth, site) if self.options.use != "alpha" else 1.0

    def gain(self, depth: Depth, site: Site | None, role: Role) -> float:
        return self.beta(depth, site) if site is not None and role.part in SCALED else 1.0

    def _alpha(self, depth: Depth, site: Site) -> float:
        if self.options.constants == "mixln":
            return 2.8284  # as written there: 64^(1/4)
        if depth.topology != "encoder-decoder":
            return pow(2 * depth.single, 1 / 4)
        if self.options.constants == "article":
            return pow(2 * depth.N, 1 / 4) if site.side == "encoder" else pow(16 * depth.N * depth.M**2, 1 / 16)
        return 0.81 * pow(depth.N**4 * depth.M, 1 / 16) if site.side == "encoder" else pow(3 * depth.M, 1 / 4)

    def _beta(self, depth: Depth, site: Site) -> float:
        constants = self.options.constants
        if depth.topology != "encoder-decoder":
            if constants == "mixln":
                return pow(8 * depth.single, 1 / 4)
            return pow(2 * depth.single, -1 / 4) if constants == "keel" else pow(8 * depth.single, -1 / 4)
        if constants == "article":
            return 1 / (sqrt(2) * self._alpha(depth, site))
        if site.side == "decoder":
            return pow(12 * depth.M, -1 / 4)
        return (1.15 if constants == "torchscale" else 0.87) * pow(depth.N**4 * depth.M, -1 / 16)
