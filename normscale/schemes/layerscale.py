"""LayerScale: Pre-Norm with a small trained multiplier for every channel of a branch."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from normscale.config.values import Fp32, says
from normscale.ops.statistics import Statistics
from normscale.schemes.pre import PreNorm
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Site, Streams


@register("layerscale")
class LayerScale(PreNorm):
    """x' = x + g . F(Norm(x)), g one trained number a channel, and one norm at the end of the stack.

    All of g begins at 0.1 up to 18 blocks, at 1e-5 up to 24, and at 1e-6 in deeper stacks; the paper speaks of depths
    18, 24 and deeper, and a depth between the first two is taken for one of 24. It has single stacks of encoders; a
    decoder alone is one with another mask. The release begins at 1e-4 unless told otherwise
    (facebookresearch/deit, `cait_models.py`).

    Reference: Touvron et al. 2021, arXiv:2103.17239, section 2.
    """

    topologies = frozenset(("encoder", "decoder"))

    class Options(PreNorm.Options):
        start: Annotated[
            Annotated[Fp32, Field(gt=0)] | None,
            says("what g begins at; null: by depth", "arXiv:2103.17239, section 2; 1e-4 in `cait_models.py`"),
        ] = None

    options: Options

    def start(self, depth: Depth) -> float:
        """Returns what g begins at."""
        if self.options.start is not None:
            return self.options.start
        return 0.1 if depth.single <= 18 else 1e-5 if depth.single <= 24 else 1e-6

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        return {"norm": make.norm(), "g": nn.Parameter(torch.full((make.width,), self.start(depth)))}

    def write(self, streams: Streams, out: Tensor, own: Own, statistics: Statistics | None = None) -> Streams:
        return super().write(streams, (own.tensor("g") * out).to(streams[0].dtype), own, statistics)
