"""The feed-forward sublayer, plain (GELU, ReLU) or gated (SwiGLU, GEGLU)."""

from collections.abc import Callable, Mapping
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from normscale.models.attention import Context
from normscale.models.projection import Projection

Activation = Literal["gelu", "relu", "swiglu", "geglu"]
FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "swiglu": F.silu,
    "geglu": F.gelu,
}
GATED: tuple[Activation, ...] = ("swiglu", "geglu")


def default_ffn_width(d: int, activation: Activation) -> int:
    """Returns 4 d for a plain layer, 8 d / 3 (rounded up to a multiple of 8) for a gated one: both cost about alike."""
    return -(-d // 3) * 8 if activation in GATED else 4 * d


class FeedForward(nn.Module):
    """out(f(in(x))), or out(f(gate(x)) * in(x)), where f is GELU (the exact one), ReLU or SiLU.

    Shape: x [B, T, D]; result [B, T, D].

    Reference: Shazeer 2020, arXiv:2002.05202, Eq. 6 (SwiGLU, GEGLU).
    """

    def __init__(
        self, d: int, ffn: int, activation: Activation, bias: bool, dropout: float, slots: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self.gated, self.dropout = activation in GATED, dropout
        self.function = FUNCTIONS[activation]
        if self.gated:
            self.up = Projection("ffn", d, {"gate": ffn, "in": ffn}, bias)
        else:
            self.up = Projection("ffn", d, {"in": ffn}, bias)
        self.out = Projection("ffn", ffn, {"out": d}, bias)
        self.slots = nn.ModuleDict(dict(slots))

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        up = self.up(x_BTD)
        if "before_act" in self.slots:
            up = self.slots["before_act"](up)
        if self.gated:
            gate, up = up.chunk(2, dim=-1)
            h_BTF = self.function(gate) * up
        else:
            h_BTF = self.function(up)
        if "after_act" in self.slots:
            h_BTF = self.slots["after_act"](h_BTF)
        if self.dropout:
            h_BTF = F.dropout(h_BTF, self.dropout, self.training)
        out: Tensor = self.out(h_BTF)
        return out
