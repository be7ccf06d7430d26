"""Sub-LN: a norm before the branch and another inside it, before its last product."""

from collections.abc import Mapping
from math import log, sqrt

from torch import nn

from normscale.schemes.pre import PreNorm
from normscale.schemes.registry import register
from normscale.schemes.scheme import SCALED, Depth, Make, Role, Site


@register("subln")
class SubLN(PreNorm):
    """x' = x + W_o Norm(Attn(Norm(x))), x' = x + W_2 Norm(f(W_1 Norm(x))), one norm at the end, and a larger init.

    The gain of the feed-forward weights, the value and the output projections grows with depth, as sqrt(ln L).
    Queries, keys, the gate of a gated layer (not in the paper; as microsoft/torchscale has it) and the whole of
    cross-attention keep gain 1; cross-attention has the norm before it alone.

    Reference: Wang et al. 2022, arXiv:2210.06423 (Magneto), Figure 2; cross-attention as in `architecture/decoder.py`
    of microsoft/torchscale.
    """

    def beta(self, depth: Depth, site: Site) -> float:
        if site.kind == "cross":
            return 1.0
        if depth.topology != "encoder-decoder":
            return sqrt(log(2 * depth.single))
        if site.side == "encoder":
            return sqrt(log(3 * depth.M) * log(2 * depth.N) / 3)
        return sqrt(log(3 * depth.M))

    def gain(self, depth: Depth, site: Site | None, role: Role) -> float:
        return self.beta(depth, site) if site is not None and role.part in SCALED else 1.0

    def slots(self, depth: Depth, site: Site, make: Make) -> Mapping[str, nn.Module]:
        if site.kind == "cross":
            return {}
        return {"after_act": make.norm(make.ffn)} if site.kind == "ffn" else {"before_o": make.norm()}
