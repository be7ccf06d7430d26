"""Causal multi-head self-attention, with the slots a scheme may fill."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscale.models.projection import Projection

Rotary = tuple[Tensor, Tensor]
"""cos and sin of the rotary angles, each [T, K]."""


def rotary_tables(context: int, head_width: int, base: float = 10_000.0) -> Rotary:
    """Returns cos and sin of t * base^(-2i/K), halves laid one after the other.

    Shape: cos, sin [T, K] fp32.

    Reference: Su et al. 2021, arXiv:2104.09864, Eq. 34 (in the half-split layout of GPT-NeoX).
    """
    frequency = base ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), frequency)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Returns `x` turned by its position's angles.

    Shape: x [..., T, K]; result the same.
    """
    cos, sin = (table[: x.shape[-2]] for table in rotary)  # fp32: a bf16 angle would be off by up to 0.4 %
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)


def attention_backend(shape: tuple[int, int, int], dropout: float, dtype: torch.dtype, device: torch.device) -> str:
    """Returns the name of the kernel that PyTorch chooses to train causal attention with.

    Shape: `shape` is (H, T, K).
    """
    from torch.nn.attention import SDPBackend

    q = torch.zeros(1, *shape, dtype=dtype, device=device, requires_grad=True)
    return SDPBackend(torch._fused_sdp_choice(q, q, q, dropout_p=dropout, is_causal=True)).name.lower()


class SelfAttention(nn.Module):
    """o(softmax(q k^T / sqrt(K)) v) under a causal mask.

    Shape: x [B, T, D]; result [B, T, D].
    """

    def __init__(self, d: int, heads: int, bias: bool, dropout: float, slots: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = Projection("self", d, {"q": d, "k": d, "v": d}, bias)
        self.o = Projection("self", d, {"o": d}, bias)
        self.slots = nn.ModuleDict(dict(slots))

    def forward(self, x_BTD: Tensor, rotary: Rotary | None) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if "qkv" in self.slots:
            q, k, v = self.slots["qkv"](q, k, v)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if "attn_scale" in self.slots:
            q = self.slots["attn_scale"](q)
        dropout = self.dropout if self.training else 0.0
        y_BHTK = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y_BTD = y_BHTK.transpose(1, 2).reshape(B, T, D)
        if "before_o" in self.slots:
            y_BTD = self.slots["before_o"](y_BTD)
        out: Tensor = self.o(y_BTD)
        return out
