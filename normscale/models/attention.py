"""Multi-head attention, over the own stream or over the encoder's output, with the slots a scheme may fill."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from normscale.models.projection import Projection
from normscale.ops import sampled
from normscale.ops.products import NATIVE, Products
from normscale.ops.statistics import write

Rotary = tuple[Tensor, Tensor]
"""cos and sin of the rotary angles, each [T, K]."""


class Context(NamedTuple):
    """What branches read besides the stream: the same for all blocks of a side.

    `keep_B11S` is False at padding of what the encoder reads: the encoder's own keys, or the memory's. On measured
    passes `places` are the sampled positions of the side, and `scores` is where this attention writes: a buffer, and
    its row.
    """

    rotary: Rotary | None = None
    memory_BSD: Tensor | None = None
    keep_B11S: Tensor | None = None
    places: sampled.Places | None = None
    scores: tuple[Tensor, Tensor] | None = None


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


def attention_backend(
    shape: tuple[int, int, int], dropout: float, dtype: torch.dtype, device: torch.device, causal: bool = True
) -> str:
    """Returns the name of the kernel that PyTorch chooses to train attention (without padding) with.

    Shape: `shape` is (H, T, K).
    """
    from torch.nn.attention import SDPBackend

    q = torch.zeros(1, *shape, dtype=dtype, device=device, requires_grad=True)
    return SDPBackend(torch._fused_sdp_choice(q, q, q, dropout_p=dropout, is_causal=causal)).name.lower()


class QKNorm(nn.Module):
    """A norm on q and one on k, each head by itself (one norm shared by all heads) or all heads as one vector.

    A `scale` multiplies q after its norm: with norms that leave a length alone it sets the size of the scores.

    Shape: q, k [B, H, T, K]; result the same.

    Reference: Henry et al. 2020, arXiv:2010.04245, section 3 (per head, the l2 norm, the scale trained; fixed at 10 in
    lucidrains/x-transformers); Wortsman et al. 2023, arXiv:2309.14322 (per head, a norm with a gain); OLMo 2,
    arXiv:2501.00656, section 2.1 (full width).
    """

    def __init__(self, q: nn.Module, k: nn.Module, full: bool, scale: nn.Parameter | float | None = None) -> None:
        super().__init__()
        self.full = full
        self.q, self.k = q, k
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.full:
            q, k = _heads_apart(self.q(_heads_joined(q)), q), _heads_apart(self.k(_heads_joined(k)), k)
        else:
            q, k = self.q(q), self.k(k)
        return q if self.scale is None else (q * self.scale).to(k.dtype), k

    def extra_repr(self) -> str:
        trained = isinstance(self.scale, nn.Parameter)
        return f"full={self.full}" + ("" if trained or self.scale is None else f", scale={self.scale:g}")


class Latent(nn.Module):
    """norm(W x), the narrow vector that k and v are made from.

    Shape: x [B, S, D]; result [B, S, C].

    Reference: DeepSeek-V2, arXiv:2405.04434, section 2.1.2 (Eq. 9, and the norm of section 3.1.2), without the
    decoupled rotary key: rope turns the k that comes out of the latent.
    """

    def __init__(self, kind: Literal["self", "cross"], d: int, width: int, bias: bool, norm: nn.Module) -> None:
        super().__init__()
        self.width = width
        self.down = Projection(kind, d, {"latent": width}, bias)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.down(x))
        return out


class _Attention(nn.Module):
    """o(softmax(q k^T / sqrt(K)) v), whatever q, k and v come from; without the root where it is not `scaled`.

    Reference: Vaswani et al. 2017, arXiv:1706.03762, Eq. 1; Raffel et al. 2020, arXiv:1910.10683 (T5), leave it out.
    """

    products: Products = NATIVE

    def __init__(
        self,
        kind: Literal["self", "cross"],
        d: int,
        heads: int,
        bias: bool,
        dropout: float,
        slots: Mapping[str, nn.Module],
        qk_norm: QKNorm | None,
        scaled: bool,
        inputs: Mapping[str, nn.Module],
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.scaled = heads, dropout, scaled
        for name, module in inputs.items():  # before o: weights are drawn in the order they stand in
            self.add_module(name, module)
        self.o = Projection(kind, d, {"o": d}, bias)
        self.slots = nn.ModuleDict(dict(slots))
        self.qk_norm = qk_norm

    def split(self, x_BTD: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Returns the parts of a product, each as heads [B, H, T, K]."""
        B, T, width = x_BTD.shape
        apart = x_BTD.view(B, T, parts, self.heads, width // parts // self.heads).unbind(2)
        return tuple(part.transpose(1, 2) for part in apart)  # in this order the backward pass copies once, not twice

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        *,
        rotary: Rotary | None,
        keep_B11S: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Returns what the heads read, projected; of the context, only what is measured is looked at.

        Shape: q [B, H, T, K]; k, v [B, H, S, K]; result [B, T, D].
        """
        if "qkv" in self.slots:
            q, k, v = self.slots["qkv"](q, k, v)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        if not self.scaled:
            q = q * q.shape[-1] ** 0.5  # which the products divide by
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if "attn_scale" in self.slots:
            q = self.slots["attn_scale"](q)
        if context.scores is not None and context.places is not None:
            row = sampled.attention_row(q, k, context.places, keep_B11S=keep_B11S, causal=causal)
            write(*context.scores, row)
        dropout = self.dropout if self.training else 0.0
        y_BTD = _heads_joined(self.products.attention(q, k, v, mask=keep_B11S, causal=causal, dropout=dropout))
        if "before_o" in self.slots:
            y_BTD = self.slots["before_o"](y_BTD)
        out: Tensor = self.o(y_BTD)
        return out

    def extra_repr(self) -> str:
        return f"scaled={self.scaled}"


class SelfAttention(_Attention):
    """Attention of the stream to itself: to the past alone when causal, else to every position that is kept.

    Shape: x [B, T, D]; result [B, T, D].
    """

    qkv: Projection
    q: Projection
    latent: Latent | None
    kv: Projection

    def __init__(
        self,
        d: int,
        heads: int,
        bias: bool,
        dropout: float,
        slots: Mapping[str, nn.Module],
        *,
        causal: bool,
        qk_norm: QKNorm | None = None,
        latent: Latent | None = None,
        scaled: bool = True,
    ) -> None:
        inputs: dict[str, nn.Module]
        if latent is None:
            inputs = {"qkv": Projection("self", d, {"q": d, "k": d, "v": d}, bias)}
        else:
            q, kv = Projection("self", d, {"q": d}, bias), Projection("self", latent.width, {"k": d, "v": d}, bias)
            inputs = {"q": q, "latent": latent, "kv": kv}
        super().__init__("self", d, heads, bias, dropout, slots, qk_norm, scaled, inputs)
        self.causal, self.latent = causal, latent

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        if self.latent is None:
            q, k, v = self.split(self.qkv(x_BTD), 3)
        else:
            (q,), (k, v) = self.split(self.q(x_BTD), 1), self.split(self.kv(self.latent(x_BTD)), 2)
        keep_B11S = None if self.causal else context.keep_B11S
        return self.attend(q, k, v, context, rotary=context.rotary, keep_B11S=keep_B11S, causal=self.causal)

    def extra_repr(self) -> str:
        return f"causal={self.causal}, {super().extra_repr()}"


class CrossAttention(_Attention):
    """Attention of the decoder's stream to the encoder's output, which comes as the encoder's stack leaves it.

    No positions are turned: a distance between two sequences means nothing.

    Shape: x [B, T, D]; result [B, T, D].
    """

    q: Projection
    latent: Latent | None
    kv: Projection

    def __init__(
        self,
        d: int,
        heads: int,
        bias: bool,
        dropout: float,
        slots: Mapping[str, nn.Module],
        *,
        qk_norm: QKNorm | None = None,
        latent: Latent | None = None,
        scaled: bool = True,
    ) -> None:
        read = {} if latent is None else {"latent": latent}
        kv = Projection("cross", d if latent is None else latent.width, {"k": d, "v": d}, bias)
        super().__init__(
            "cross",
            d,
            heads,
            bias,
            dropout,
            slots,
            qk_norm,
            scaled,
            {"q": Projection("cross", d, {"q": d}, bias), **read, "kv": kv},
        )
        self.latent = latent

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        memory_BSD = context.memory_BSD
        assert memory_BSD is not None, "cross-attention runs beside an encoder"
        (q,) = self.split(self.q(x_BTD), 1)
        k, v = self.split(self.kv(memory_BSD if self.latent is None else self.latent(memory_BSD)), 2)
        return self.attend(q, k, v, context, rotary=None, keep_B11S=context.keep_B11S, causal=False)


def _heads_joined(x_BHTK: Tensor) -> Tensor:
    B, H, T, K = x_BHTK.shape
    return x_BHTK.transpose(1, 2).reshape(B, T, H * K)


def _heads_apart(x_BTD: Tensor, like_BHTK: Tensor) -> Tensor:
    B, H, T, K = like_BHTK.shape
    return x_BTD.view(B, T, H, K).transpose(1, 2)
