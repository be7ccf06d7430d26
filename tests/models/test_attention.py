"""Attention in each of its forms against formulas written out here; every product goes one way."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscale.config.schema import ModelConfig
from normscale.models.attention import Context, rotary_tables, rotate
from normscale.models.builder import build
from normscale.ops.products import Native

H, K, D = 2, 8, 16
X = torch.randn(2, 6, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
MEMORY = torch.randn(2, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
KEEP = torch.tensor([[True] * 5, [True, True, True, False, False]])
ROTARY = rotary_tables(6, K)


def branch(side: str, kind: str, **options: Any) -> Any:
    """A branch of an encoder-decoder model, with no weight, gain or bias at a value that could hide it."""
    config = ModelConfig(N=1, M=1, d=D, heads=H, context=8, **options)
    sublayers = build(config, 32, 0).double().sublayers()
    found = next(s.branch for s in sublayers if (s.site.side, s.site.kind) == (side, kind))
    with torch.no_grad():
        for i, p in enumerate(found.parameters()):
            p.add_(0.2 * torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(i)))
    return found


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], H, K).transpose(1, 2)


def part(layer: Any, name: str, x: Tensor) -> Tensor:
    """What one part of a projection makes of `x`."""
    rows = next(rows for _, rows, role in layer.roles() if role.part == name)
    return F.linear(x, layer.weight[rows], layer.bias[rows])


def attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) / K**0.5
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def norm(layer: Any, x: Tensor) -> Tensor:
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    return x * layer.gamma + layer.bias


def test_cross_attention_equals_its_formula() -> None:
    cross = branch("decoder", "cross")
    q, k, v = (heads(part(*given)) for given in ((cross.q, "q", X), (cross.kv, "k", MEMORY), (cross.kv, "v", MEMORY)))
    want = part(cross.o, "o", attended(q, k, v, KEEP[:, None, None]))
    torch.testing.assert_close(cross(X, Context(ROTARY, MEMORY, KEEP[:, None, None])), want)
    want = part(cross.o, "o", attended(q, k, v, None))
    torch.testing.assert_close(cross(X, Context(ROTARY, MEMORY)), want)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_self_attention_is_causal_in_the_decoder_and_masked_in_the_encoder(side: str) -> None:
    attention = branch(side, "self")
    q, k, v = (heads(part(attention.qkv, name, X)) for name in "qkv")
    keep = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])[:, None, None]
    seen = torch.ones(6, 6).tril().bool() if side == "decoder" else keep
    want = part(attention.o, "o", attended(rotate(q, ROTARY), rotate(k, ROTARY), v, seen))
    # The decoder is given the mask of the source, which is not of its own stream.
    torch.testing.assert_close(attention(X, Context(ROTARY, None, keep)), want)


@pytest.mark.parametrize("scope", ["head", "full"])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_the_norm_on_q_and_k_comes_before_the_rotation(scope: str, kind: str) -> None:
    attention = branch("decoder", kind, qk_norm=scope)
    assert attention.qk_norm.q.width == attention.qk_norm.k.width == (K if scope == "head" else D)
    if kind == "self":
        q, k, v = (part(attention.qkv, name, X) for name in "qkv")
    else:
        q, k, v = part(attention.q, "q", X), part(attention.kv, "k", MEMORY), part(attention.kv, "v", MEMORY)
    if scope == "full":
        q, k = heads(norm(attention.qk_norm.q, q)), heads(norm(attention.qk_norm.k, k))
    else:
        q, k = norm(attention.qk_norm.q, heads(q)), norm(attention.qk_norm.k, heads(k))
    if kind == "self":
        q, k = rotate(q, ROTARY), rotate(k, ROTARY)
    seen = torch.ones(6, 6).tril().bool() if kind == "self" else None
    want = part(attention.o, "o", attended(q, k, heads(v), seen))
    torch.testing.assert_close(attention(X, Context(ROTARY, MEMORY)), want)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_the_l2_norm_makes_scores_of_cosines(kind: str, trained: bool) -> None:
    attention = branch("decoder", kind, qk_norm="l2", qk_scale=7.0, qk_scale_trained=trained, eps=0.0)
    assert [name for name, _ in attention.qk_norm.named_parameters()] == (["scale"] if trained else [])
    scale = attention.qk_norm.scale * K**0.5 if trained else 7.0  # a trained one was moved from where it starts
    if kind == "self":
        q, k, v = (heads(part(attention.qkv, name, X)) for name in "qkv")
    else:
        q, k, v = (heads(part(attention.q, "q", X)), *(heads(part(attention.kv, name, MEMORY)) for name in "kv"))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    if kind == "self":
        q, k = rotate(q, ROTARY), rotate(k, ROTARY)
    seen = torch.ones(6, 6).tril().bool() if kind == "self" else None
    want = part(attention.o, "o", attended(scale * q * K**0.5, k, v, seen))
    torch.testing.assert_close(attention(X, Context(ROTARY, MEMORY)), want)


def test_a_trained_scale_starts_at_its_number() -> None:
    model = build(ModelConfig(M=2, d=D, heads=H, context=8, qk_norm="l2", qk_scale=7.0, qk_scale_trained=True), 32, 0)
    scales = [p for name, p in model.named_parameters() if name.endswith("qk_norm.scale")]
    assert [float(p) * K**0.5 for p in scales] == pytest.approx([7.0, 7.0])
    model(torch.randint(0, 32, (1, 8))).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in scales)


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_scores_can_do_without_the_root_of_the_head_width(kind: str) -> None:
    attention = branch("decoder", kind, attention_scale=False)
    if kind == "self":
        q, k, v = (heads(part(attention.qkv, name, X)) for name in "qkv")
        q, k = rotate(q, ROTARY), rotate(k, ROTARY)
    else:
        q, k, v = (heads(part(attention.q, "q", X)), *(heads(part(attention.kv, name, MEMORY)) for name in "kv"))
    seen = torch.ones(6, 6).tril().bool() if kind == "self" else None
    scores = (q @ k.transpose(-1, -2)).masked_fill(~seen if seen is not None else torch.tensor(False), -torch.inf)
    want = part(attention.o, "o", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(X, Context(ROTARY, MEMORY)), want)
    assert not torch.allclose(want, part(attention.o, "o", attended(q, k, v, seen)), atol=1e-3)


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_k_and_v_come_from_the_normed_latent(kind: str) -> None:
    attention = branch("decoder", kind, kv_latent=6)
    source = X if kind == "self" else MEMORY
    latent = norm(attention.latent.norm, part(attention.latent.down, "latent", source))
    assert latent.shape[-1] == 6
    q, k, v = (
        heads(part(*given))
        for given in ((attention.q, "q", X), (attention.kv, "k", latent), (attention.kv, "v", latent))
    )
    if kind == "self":
        q, k = rotate(q, ROTARY), rotate(k, ROTARY)
    seen = torch.ones(6, 6).tril().bool() if kind == "self" else None
    want = part(attention.o, "o", attended(q, k, v, seen))
    torch.testing.assert_close(attention(X, Context(ROTARY, MEMORY)), want)


def test_every_product_goes_through_the_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(N=2, M=2, d=D, heads=H, context=8, kv_latent=6, activation="swiglu")
    model = build(config, 32, 0)
    linear, attention = F.linear, F.scaled_dot_product_attention

    class Counting:
        calls: list[str] = []

        def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            self.calls.append("linear")
            return linear(x, weight, bias)

        def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
            self.calls.append("attention")
            return attention(q, k, v, attn_mask=mask, is_causal=options["causal"])

    tokens, source = torch.randint(0, 32, (2, 8)), torch.randint(0, 32, (2, 8))
    want = model(tokens, source_BS=source)
    for module in model.modules():
        if hasattr(module, "products"):
            assert isinstance(module.products, Native)
            module.products = Counting()

    def elsewhere(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a product beside the one place")

    for name in ("linear", "scaled_dot_product_attention"):
        monkeypatch.setattr(F, name, elsewhere)
    monkeypatch.setattr(nn.functional, "linear", elsewhere)
    torch.testing.assert_close(model(tokens, source_BS=source), want)
    # Attention: q, latent, kv, o; feed-forward: up, out; the head.
    assert (Counting.calls.count("linear"), Counting.calls.count("attention")) == (4 * 6 + 2 * 4 + 1, 6)
