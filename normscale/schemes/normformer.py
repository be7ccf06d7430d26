"""NormFormer: Pre-Norm with norms and scales at three more places."""

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn

from normscale.config.values import Flag, conflict, says
from normscale.ops.residual import scaled_residual
from normscale.ops.statistics import Statistics
from normscale.schemes.pre import PreNorm
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Site, Streams

_PAPER = "arXiv:2110.09456, section 2"


class HeadScale(nn.Module):
    """Multiplies each head by a trained number that starts at 1.

    Shape: x [B, T, D], heads side by side; result the same.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        scaled = x.view(B, T, len(self.gamma), -1) * self.gamma.unsqueeze(-1)
        return scaled.view(B, T, D).to(x.dtype)  # a gain in fp32 would widen what comes after it


@register("normformer")
class NormFormer(PreNorm):
    """x' = x + Norm(W_o [gamma_h head_h]) and x' = lambda * x + W_2 Norm(f(W_1 Norm(x))), with attention on Norm(x).

    One norm at the end of the stack. Each of the four additions can be left out; without any it is `pre`. In a decoder
    beside an encoder cross-attention stays as Pre-Norm has it: the paper has none, and fairseq's code adds nothing.

    Reference: Shleifer et al. 2021, arXiv:2110.09456, section 2; `modules/transformer_layer.py` of fairseq.
    """

    class Options(PreNorm.Options):
        """The four additions, and where the heads are scaled.

        heads=paper: each head by itself, before the output projection. heads=fairseq: what comes out of that
            projection, as the released code has it, though its channels are no heads any more.
        """

        scale_attn: Annotated[Flag, says("a norm on attention's output", _PAPER)] = True
        scale_fc: Annotated[Flag, says("a norm before the last product of the feed-forward layer", _PAPER)] = True
        scale_heads: Annotated[Flag, says("a trained number for each head, from 1", _PAPER)] = True
        scale_resids: Annotated[
            Flag,
            says(
                "a trained number for each channel of the feed-forward layer's residual, from 1",
                f"{_PAPER}, in its smaller models alone",
            ),
        ] = False
        heads: Annotated[
            Literal["paper", "fairseq"],
            says("where the heads are scaled", f"{_PAPER}; `modules/transformer_layer.py` of fairseq"),
        ] = "paper"

        @model_validator(mode="after")
        def _combinations(self) -> "NormFormer.Options":
            if self.heads != "paper" and not self.scale_heads:
                raise conflict("heads=fairseq would do nothing with scale_heads=false; remove one of them", "heads")
            return self

    options: Options

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        parts: dict[str, nn.Module | nn.Parameter | float] = {"norm": make.norm()}
        options = self.options
        if site.kind == "self" and options.scale_heads and options.heads == "fairseq":
            parts["out_scale"] = HeadScale(make.heads)
        if site.kind == "self" and options.scale_attn:
            parts["out_norm"] = make.norm()
        if site.kind == "ffn" and options.scale_resids:
            parts["resid"] = nn.Parameter(torch.ones(make.width))
        return parts

    def slots(self, depth: Depth, site: Site, make: Make) -> Mapping[str, nn.Module]:
        options = self.options
        if site.kind == "self" and options.scale_heads and options.heads == "paper":
            return {"before_o": HeadScale(make.heads)}
        return {"after_act": make.norm(make.ffn)} if site.kind == "ffn" and options.scale_fc else {}

    def seen_through(self, own: Own) -> nn.Module | None:
        """As `PreNorm`; a scaled residual is no sum that a kernel makes together with the next norm."""
        return None if self.options.scale_resids else super().seen_through(own)

    def write(self, streams: Streams, out: Tensor, own: Own, statistics: Statistics | None = None) -> Streams:
        for name in ("out_scale", "out_norm"):
            out = own.module(name)(out) if own.has(name) else out
        if not own.has("resid"):
            return super().write(streams, out, own, statistics)
        z = scaled_residual(streams[0], out, own.tensor("resid"))
        if statistics is not None:
            z = statistics.watch(z)
            statistics.write(z, z)
        return (z,)
