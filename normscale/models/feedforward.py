"""The feed-forward sublayer, plain (GELU) or gated (SwiGLU)."""

from collections.abc import Mapping
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from normscale.models.attention import Rotary
from normscale.models.projection import Projection

Activation = Literal["gelu", "swiglu"]


def default_ffn_width(d: int, activation: Activation) -> int:
    """Returns 4 d for a plain layer, 8 d / 3 (rounded up to a multiple of 8) for a gated one: both cost about alike."""
    return 4 * d if activation == "gelu" else -(-d // 3) * 8


class FeedForward(nn.Module):
    """out(gelu(in(x))), or out(silu(gate(x)) * in(x)).

    Shape: x [B, T, D]; result [B, T, D].

    Reference: Shazeer 2020, arXiv:2002.05202, Eq. 6 (SwiGLU).
    """

    def __init__(
        self, d: int, ffn: int, activation: Activation, bias: bool, dropout: float, slots: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self.gated, self.dropout = activation == "swiglu", dropout
        if self.gated:
            self.up = Projection("ffn", d, {"gate": ffn, "in": ffn}, bias)
        else:
            self.up = Projection("ffn", d, {"in": ffn}, bias)
        self.out = Projection("ffn", ffn, {"out": d}, bias)
        self.slots = nn.ModuleDict(dict(slots))

    def forward(self, x_BTD: Tensor, rotary: Rotary | None) -> Tensor:
        up = self.up(x_BTD)
        if "before_act" in self.slots:
            up = self.slots["before_act"](up)
        if self.gated:
            gate, up = up.chunk(2, dim=-1)
            h_BTF = F.silu(gate) * up
        else:
            h_BTF = F.gelu(up)
        if "after_act" in self.slots:
            h_BTF = self.slots["after_act"](h_BTF)
        if self.dropout:
            h_BTF = F.dropout(h_BTF, self.dropout, self.training)
        out: Tensor = self.out(h_BTF)
        return out
