"""HybridNorm: norms on q, k and v in attention, Post-Norm around the feed-forward layer."""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from torch import Tensor, nn

from normscale.config.schema import ModelConfig
from normscale.config.values import Flag, Section, says
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Scheme, Side, Site, Streams


class QKVNorm(nn.Module):
    """A norm on each of q, k and v: each head by itself (one norm shared by all heads), or all heads as one vector.

    Shape: q [B, H, T, K], k, v [B, H, S, K]; results the same.
    """

    def __init__(self, width: int, norm: Callable[[int], nn.Module], *, full: bool) -> None:
        super().__init__()
        self.full = full
        self.q, self.k, self.v = norm(width), norm(width), norm(width)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._one(self.q, q), self._one(self.k, k), self._one(self.v, v)

    def _one(self, norm: nn.Module, x: Tensor) -> Tensor:
        if not self.full:
            y: Tensor = norm(x)
            return y
        B, H, S, K = x.shape
        joined: Tensor = norm(x.transpose(1, 2).reshape(B, S, H * K))
        return joined.view(B, S, H, K).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"full={self.full}"


@register("hybridnorm")
class HybridNorm(Scheme):
    """z = Norm(x + Attn(x)), where attention norms q, k and v and not its input; x' = z + FFN(z).

    z is both what the feed-forward layer reads and its residual, so that the norm before that layer is the Post-Norm
    of attention: one operation where norms are fused. One norm at the end of the stack. HybridNorm* (`star`) has the
    first block read Norm(x) in attention, q, k and v normed as elsewhere, and a Pre-Norm feed-forward layer: a second
    block structure, hence a second compiled graph. The authors draw output projections smaller and hold that to be
    essential, as is warm-up: `model.init=normal`, `model.init_scaled`.

    Reference: Zhuo et al. 2025, arXiv:2503.04598, Algorithm 1; the norm at the end and HybridNorm* as the
    configurations of BryceZhuo/HybridNorm have them.
    """

    topologies = frozenset(("encoder", "decoder"))
    refuses = {"final_norm": "the norm at the end is part of it: what a feed-forward layer leaves is not normed"}

    class Options(Section):
        star: Annotated[
            Flag,
            says(
                "HybridNorm*: the first block is Pre-Norm beside its norms of q, k and v",
                "arXiv:2503.04598 (HybridNorm*); BryceZhuo/HybridNorm",
            ),
        ] = False
        qkv_norm: Annotated[
            Literal["head", "full"],
            says(
                "norms of q, k and v of each head, or of all heads as one vector",
                "arXiv:2503.04598, Algorithm 1 (head)",
            ),
        ] = "head"

    options: Options

    def clash(self, config: ModelConfig) -> tuple[str, str] | None:
        if self.options.qkv_norm == "head" and config.heads == config.d:
            said = f"its norms of q, k and v have heads of one channel to normalise (model.d={config.d})"
            return "heads", f"{said}; choose fewer, or model.scheme_options.qkv_norm=full"
        return None

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        if self.options.star and site.block == 0:
            return {"norm": make.norm()}
        return {"norm": make.norm(), "alpha": 1.0} if site.kind == "self" else {}

    def own_ends(self, depth: Depth, side: Side, make: Make) -> Parts:
        return {"norm": make.norm()}

    def slots(self, depth: Depth, site: Site, make: Make) -> Mapping[str, nn.Module]:
        if site.kind == "ffn":
            return {}
        full = self.options.qkv_norm == "full"
        return {"qkv": QKVNorm(make.width if full else make.width // make.heads, make.norm, full=full)}

    def read(self, streams: Streams, own: Own) -> Tensor:
        before = own.has("norm") and not own.has("alpha")
        x: Tensor = own.module("norm")(streams[0]) if before else streams[0]
        return x

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        if own.has("alpha"):
            return (own.module("norm").residual(streams[0], out, own.tensor("alpha")),)
        return (streams[0] + out,)
