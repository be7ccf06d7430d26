"""DS-Init: Post-Norm, each block initialised smaller than the one below it."""

from math import pow
from typing import Annotated, Literal

from pydantic import Field

from normscale.config.values import Number, Section, says
from normscale.schemes.post import PostNorm
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Role, Site


@register("dsinit")
class DSInit(PostNorm):
    """Post-Norm, with all matrices of block l drawn from U(-g a / sqrt(l), g a / sqrt(l)), g = sqrt(6 / (in + out)).

    Blocks are counted from 1 on each side; the ends keep gain 1. The uniform draw is `model.init=xavier_uniform`; with
    another init its deviation is what is scaled.

    Reference: Zhang et al. 2019, arXiv:1908.11365, section 4 (depth-scaled initialization).
    """

    class Options(Section):
        """The release passes a / sqrt(l) as a factor on the variance, so that its deviation falls as l^(-1/4)
        (bzhangGo/zero, `models/transformer.py`, by what TensorFlow's initialiser makes of it).
        """

        constants: Annotated[
            Literal["paper", "release"],
            says("release: the deviation falls as l^(-1/4)", "arXiv:1908.11365, section 4; bzhangGo/zero"),
        ] = "paper"
        a: Annotated[
            Annotated[Number, Field(gt=0, le=1)],
            says("factor on the deviation of all blocks", "arXiv:1908.11365, section 4"),
        ] = 1.0

    options: Options

    def beta(self, depth: Depth, site: Site) -> float:
        variance = self.options.constants == "release"
        scale = self.options.a * pow(site.block + 1, -1 / 2)
        return pow(scale, 1 / 2) if variance else scale

    def gain(self, depth: Depth, site: Site | None, role: Role) -> float:
        return 1.0 if site is None else self.beta(depth, site)
