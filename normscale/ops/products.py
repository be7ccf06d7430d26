"""The matrix products of the network: one place that decides what they are computed in.

`Native` leaves it to PyTorch. `Rounded` computes in fp32 what a machine with narrow products would give: it rounds
operands, results and gradients, so that a CPU shows what fp16 and fp8 do to training.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Softmax = Literal["fp32", "compute"]


class Products(Protocol):
    """What the network asks of its products."""

    @property
    def softmax(self) -> Softmax: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns x W^T + b.

        Shape: x [..., D_in]; weight [D_out, D_in]; bias [D_out] or None; result [..., D_out].
        """

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool, dropout: float
    ) -> Tensor:
        """Returns softmax(q k^T / sqrt(K)) v; `mask` is False where a query must not look.

        A query that may look nowhere gets 0, and gives no gradient.

        Shape: q [B, H, T, K]; k, v [B, H, S, K]; mask broadcasts to [B, H, T, S]; result [B, H, T, K].
        """


@dataclass(frozen=True)
class Native:
    """Products as PyTorch computes them, in the dtype of their operands or what autocast makes of it.

    With `operands`, linear operands are cast to that dtype first: fp32 products beside a bf16 stream or bf16 weights.
    With softmax="fp32" attention is PyTorch's fused function, which keeps the scores and the softmax in fp32. With
    "compute" it is not fused: scores, softmax and attention weights are tensors of the compute dtype.
    """

    softmax: Softmax = "fp32"
    operands: torch.dtype | None = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.operands is not None:
            x, weight = x.to(self.operands), weight.to(self.operands)
            bias = None if bias is None else bias.to(self.operands)
        return F.linear(x, weight, bias)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool, dropout: float
    ) -> Tensor:
        if self.softmax == "fp32":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        with torch.autocast(q.device.type, enabled=False):  # which would go to fp32 here
            weights = _weights(scores, mask, causal, _softmax)
        return _dropped(weights, dropout) @ v


NATIVE = Native()


# Rounding. Each function returns fp32 numbers that are exact in the format, rounded to nearest, ties to even.


def to_fp16(x: Tensor) -> Tensor:
    """Returns `x` rounded to fp16: above 65504 to Inf, subnormals and NaN kept; in fp32."""
    return x.to(torch.float16).to(torch.float32)


def to_bf16(x: Tensor) -> Tensor:
    """Returns `x` rounded to bf16, in fp32."""
    return x.to(torch.bfloat16).to(torch.float32)


def to_e4m3(x: Tensor) -> Tensor:
    """Returns `x` rounded to float8_e4m3fn after scaling by the largest entry (see `_scaled`), in fp32."""
    return _scaled(x, mantissa=3, smallest=2.0**-6, largest=448.0)


def to_e5m2(x: Tensor) -> Tensor:
    """Returns `x` rounded to float8_e5m2 after scaling by the largest entry (see `_scaled`), in fp32."""
    return _scaled(x, mantissa=2, smallest=2.0**-14, largest=57344.0)


def _scaled(x: Tensor, mantissa: int, smallest: float, largest: float) -> Tensor:
    """Returns `x` rounded on the fp8 grid that puts its largest magnitude on the format's largest number.

    This is scaling per tensor by the current amax: the fp32 factor is largest / amax, taken of the very tensor that is
    rounded, and taken out again after. Nothing can overflow, so the saturation that hardware casts do is not needed;
    small entries become subnormal, then 0. An entry that is not finite gives NaN, where a saturating cast would hide
    an Inf. `smallest` is the least normal number. Dividing by the factor costs a rounding to fp32, as it does anywhere.

    The rounding adds and takes away 1.5 * 2^(23 - mantissa) binades: the sum's last bit is the format's. PyTorch's own
    cast gives the same numbers at four times the cost, and its treatment of Inf has changed between versions.
    """
    x = x.float()
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    factor = torch.where((amax > 0) & torch.isfinite(amax), largest / amax, 1.0).clamp(
        max=torch.finfo(torch.float32).max
    )
    scaled = x * factor
    binade = (scaled.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=smallest)
    binade.mul_(1.5 * 2.0 ** (23 - mantissa))
    return scaled.add_(binade).sub_(binade).div_(factor)


@dataclass(frozen=True)
class Format:
    """How one compute precision rounds: operands on the way forward, gradients coming in, and every result.

    `dtype` is PyTorch's name of the operands' type, `kept` the type of results, `elsewhere` the format of the products
    inside attention and of the head (None: this one).
    """

    dtype: str
    operand: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor], Tensor]
    kept: torch.dtype
    elsewhere: "Format | None" = None

    def result(self, x: Tensor) -> Tensor:
        """Returns `x` rounded as a result, in fp32."""
        return x.to(self.kept).to(torch.float32)

    def result_(self, x: Tensor) -> Tensor:
        """Returns `x`, fp32, rounded in place: a third cheaper, for what nobody else holds."""
        return x.copy_(x.to(self.kept))


BF16 = Format("bfloat16", to_bf16, to_bf16, torch.bfloat16)
FORMATS: dict[str, Format] = {
    "fp16": Format("float16", to_fp16, to_fp16, torch.float16),
    "fp8_e4m3": Format("float8_e4m3fn", to_e4m3, to_e5m2, torch.bfloat16, elsewhere=BF16),
    "fp8_e5m2": Format("float8_e5m2", to_e5m2, to_e5m2, torch.bfloat16, elsewhere=BF16),
}


class _Product(torch.autograd.Function):
    """a b^T + bias, with everything that goes in or comes out rounded, forward and backward.

    Forward: A = operand(a), B = operand(b), y = result(A B^T + result(bias)).
    Backward: G = gradient(dy), da = result(G B), db = result(G^T A), dbias = result(sum of G over its rows).
    Sums are in fp32.

    Shape: a [..., M, K]; b [..., N, K]; bias [N] or None (two dimensions only); result [..., M, N].
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, format: Format) -> Tensor:
        a, b = format.operand(a), format.operand(b)
        ctx.save_for_backward(a, b)
        ctx.format, ctx.biased = format, bias is not None
        if bias is None:
            return format.result_(a @ b.mT)
        return format.result_(F.linear(a, b, format.result(bias)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        format: Format = ctx.format
        wants_a, wants_b = ctx.needs_input_grad[:2]
        g = format.gradient(grads[0])
        return (
            format.result_(g @ b) if wants_a else None,
            format.result_(g.mT @ a) if wants_b else None,
            format.result_(g.sum(0)) if ctx.biased else None,
            None,
        )


class _Softmax(torch.autograd.Function):
    """softmax(x) over the last dimension as a half-precision tensor has it: in and out rounded, fp32 in between.

    Forward: p = result(softmax(result(x))).
    Backward: g = result(dp), dx = result(p * (g - sum of g * p)), with the rounded p.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: Format) -> Tensor:
        p = format.result_(torch.softmax(format.result(x), dim=-1))
        ctx.save_for_backward(p)
        ctx.format = format
        return p

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (p,) = ctx.saved_tensors
        g = ctx.format.result(grads[0])
        return ctx.format.result_(torch._softmax_backward_data(g, p, -1, torch.float32)), None


def _product(a: Tensor, b: Tensor, bias: Tensor | None, format: Format) -> Tensor:
    y: Tensor = _Product.apply(a, b, bias, format)  # type: ignore[no-untyped-call]
    return y


def _rounded_softmax(x: Tensor, format: Format) -> Tensor:
    p: Tensor = _Softmax.apply(x, format)  # type: ignore[no-untyped-call]
    return p


@dataclass(frozen=True)
class Rounded:
    """Products computed in fp32 between operands rounded to a format, with rounded results and gradients.

    fp16 is what autocast to fp16 gives where products are summed in fp32: weights, biases and activations are rounded
    on their way in, and the gradients of both operands and of the bias on their way out. An entry beyond 65504 becomes
    Inf. What differs: results stay in fp32 tensors, so that what stands between two products (activation, gate,
    dropout, slots) is computed in fp32 and rounded where it enters the next product, not after every operation;
    attention is the unfused one, with scores rounded *before* they are divided by sqrt(K), where a fused kernel keeps
    them in fp32; sums have fp32's order of the machine at hand.

    fp8 is the usual recipe of per-tensor current scaling: fp8_e4m3 rounds operands to e4m3 and incoming gradients to
    e5m2, fp8_e5m2 both to e5m2; results are kept in bf16, as they are beside fp8 products. The products inside
    attention and the head are rounded to bf16 and not to fp8, as in practice. What differs from hardware: sums are in
    full fp32, where fp8 units may keep fewer bits of them; Inf gives NaN and does not saturate. Since every tensor is
    scaled by itself, a loss scale shifts nothing here, but the run keeps it as for fp16.

    With softmax="compute" scores and attention weights are rounded as results are, forward and backward, around a
    softmax computed in fp32: what `torch.softmax` does with a half-precision tensor.

    Reference: Micikevicius et al. 2018, arXiv:1710.03740 (fp16); Micikevicius et al. 2022, arXiv:2209.05433 (fp8).
    """

    format: Format
    softmax: Softmax = "fp32"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = _product(x.reshape(-1, x.shape[-1]), weight, bias, self.format)
        return y.view(*x.shape[:-1], weight.shape[0])

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool, dropout: float
    ) -> Tensor:
        format = self.in_attention
        scores = _product(q, k, None, format) * q.shape[-1] ** -0.5
        softmax = partial(_rounded_softmax, format=format) if self.softmax == "compute" else _softmax
        weights = _weights(scores, mask, causal, softmax)
        return _product(_dropped(weights, dropout), v.mT, None, format)

    @property
    def in_attention(self) -> Format:
        """The format of the products inside attention, which are left out of fp8."""
        return self.format.elsewhere or self.format

    def at_head(self) -> "Rounded":
        """Returns the products of the head, which is left out of fp8 too."""
        return Rounded(self.format.elsewhere or self.format, self.softmax)

    def holds(self, y: Tensor) -> bool:
        """Tells whether every entry of `y` is a result in the format, or not finite."""
        return torch.equal(torch.nan_to_num(self.format.result(y)), torch.nan_to_num(y.float()))


def _softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1)


def _weights(scores_BHTS: Tensor, mask: Tensor | None, causal: bool, softmax: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the softmax of the scores, without those where a query must not look; 0 for one that may look nowhere."""
    seen = mask
    if causal:
        past = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=scores_BHTS.device).tril()
        seen = past if mask is None else mask & past
    if seen is None:
        return softmax(scores_BHTS)
    if mask is None:  # every query sees itself
        return softmax(scores_BHTS.masked_fill(~seen, -torch.inf))
    blind = ~seen.any(-1, keepdim=True)  # a row of -Inf alone would be NaN, forward and back
    hidden = scores_BHTS.new_zeros(()).masked_fill(~blind, -torch.inf)
    return softmax(torch.where(seen, scores_BHTS, hidden)).masked_fill(blind, 0.0)


def _dropped(weights: Tensor, dropout: float) -> Tensor:
    return F.dropout(weights, dropout) if dropout else weights  # no draw where nothing is dropped
