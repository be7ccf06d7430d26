"""What a scheme may put inside the branches and on the logits, against formulas written out here."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscale.config.schema import ModelConfig
from normscale.models.attention import Context, rotary_tables, rotate
from normscale.models.builder import build
from normscale.models.feedforward import FeedForward
from normscale.models.stack import Transformer
from normscale.schemes import Depth, Make, Own, Parts, Scheme, Site, Streams, registry

MODEL = {"M": 2, "d": 16, "heads": 2, "context": 8, "ffn": 24, "bias": False, "scheme": "guest"}
TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))


def factors(width: int, start: float) -> Tensor:
    """One factor a channel: unlike one number for all, it commutes neither with the rotation nor with a product."""
    return start + torch.arange(width) / width


class Times(nn.Module):
    """Multiplies each of its arguments by its own factors."""

    factors: Tensor

    def __init__(self, *each: Tensor) -> None:
        super().__init__()
        self.register_buffer("factors", torch.stack(each), persistent=False)

    def forward(self, *xs: Tensor) -> Tensor | tuple[Tensor, ...]:
        ys = tuple(x * f for x, f in zip(xs, self.factors, strict=True))
        return ys if len(ys) > 1 else ys[0]


QKV = (factors(8, 0.5), factors(8, 1.5), factors(8, 2.5))
ATTN_SCALE, BEFORE_O = factors(8, -2.0), factors(16, 3.0)
AFTER_ACT, LOGIT_SCALE = factors(24, -0.5), 0.25


def before_act(gated: bool) -> Tensor:
    return factors(48 if gated else 24, 1.25)


class Guest(Scheme):
    """x' = x + F(x), with every slot filled."""

    def own_ends(self, depth: Depth, side: str, make: Make) -> Parts:
        return {"logit_scale": LOGIT_SCALE}

    def slots(self, depth: Depth, site: Site, make: Make) -> Mapping[str, nn.Module]:
        if site.kind == "self":
            return {"qkv": Times(*QKV), "attn_scale": Times(ATTN_SCALE), "before_o": Times(BEFORE_O)}
        return {"before_act": Times(before_act(self.gated)), "after_act": Times(AFTER_ACT)}

    gated = False


class Gated(Guest):
    gated = True


def rows(layer: Any, part: str) -> Tensor:
    """The rows of a projection's weight that are for `part`."""
    return next(layer.weight[rows] for _, rows, role in layer.roles() if role.part == part)


def attention(x: Tensor, branch: Any) -> Tensor:
    heads = [F.linear(x, rows(branch.qkv, part)).view(2, 8, 2, 8).transpose(1, 2) for part in "qkv"]
    q, k, v = (h * f for h, f in zip(heads, QKV, strict=True))
    tables = rotary_tables(8, 8)
    scores = (rotate(q, tables) * ATTN_SCALE) @ rotate(k, tables).transpose(-1, -2) / 8**0.5
    weights = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf).softmax(-1)
    return F.linear((weights @ v).transpose(1, 2).reshape(2, 8, 16) * BEFORE_O, branch.o.weight)


def feedforward(x: Tensor, branch: Any, gated: bool) -> Tensor:
    parts = [rows(branch.up, part) for part in (("gate", "in") if gated else ("in",))]
    up = torch.cat([F.linear(x, w) for w in parts], dim=-1) * before_act(gated)
    h = up[..., :24] * up[..., :24].sigmoid() * up[..., 24:] if gated else F.gelu(up)
    return F.linear(h * AFTER_ACT, branch.out.weight)


@pytest.mark.parametrize("scheme", [Guest, Gated])
def test_every_slot_is_used_and_in_its_place(scheme: type[Guest], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.SCHEMES.classes, "guest", scheme)
    model = build(ModelConfig(**MODEL, activation="swiglu" if scheme.gated else "gelu"), 32, 0).double()
    x = model.token[TOKENS] * 4.0
    for sublayer in model.sublayers():
        attends = sublayer.site.kind == "self"
        x = x + (attention(x, sublayer.branch) if attends else feedforward(x, sublayer.branch, scheme.gated))
    torch.testing.assert_close(model.features(TOKENS), x)
    torch.testing.assert_close(model(TOKENS), x @ model.token.T * LOGIT_SCALE)


def test_a_trained_logit_scale_gets_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trained(Scheme):
        def own_ends(self, depth: Depth, side: str, make: Make) -> Parts:
            return {"logit_scale": nn.Parameter(torch.linspace(1, 2, make.vocab))}

    monkeypatch.setitem(registry.SCHEMES.classes, "guest", Trained)
    model: Any = build(ModelConfig(**MODEL, tied=False), 32, 0).double()
    scale = model.ends.tensor("logit_scale")
    logits = model(TOKENS)
    torch.testing.assert_close(logits, model.features(TOKENS) @ model.logits.T * scale)
    logits.sum().backward()
    torch.testing.assert_close(scale.grad, (logits / scale).sum((0, 1)))


@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu", "geglu"])
def test_a_feedforward_without_slots_equals_its_formula(activation: Any) -> None:
    layer: Any = FeedForward(16, 24, activation, True, 0.0, {}).double()
    for p in layer.parameters():
        nn.init.normal_(p)
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    up = {
        part: F.linear(x, rows(layer.up, part), layer.up.bias[24 * i : 24 * i + 24])
        for i, part in enumerate(layer.up.parts)
    }
    h = {
        "gelu": lambda: F.gelu(up["in"]),
        "relu": lambda: up["in"].clamp(min=0),
        "swiglu": lambda: up["gate"] * up["gate"].sigmoid() * up["in"],
        "geglu": lambda: F.gelu(up["gate"]) * up["in"],
    }[activation]()
    torch.testing.assert_close(layer(x, Context()), F.linear(h, layer.out.weight, layer.out.bias))


# What makes two blocks one structure.


class Tagged(Scheme):
    """Owns `own_parts[0]` in the first block and `own_parts[1]` in the others."""

    own_parts: tuple[Parts, Parts]

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        return self.own_parts[min(site.block, 1)]

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        return (streams[0] + out,)


@pytest.mark.parametrize(
    ("first", "other", "structures"),
    [
        ({"a": nn.Dropout(0.1)}, {"a": nn.Dropout(0.1)}, 1),
        ({"a": nn.Dropout(0.1)}, {"a": nn.Dropout(0.2)}, 2),  # an option
        ({"a": nn.Tanh()}, {"a": nn.Sigmoid()}, 2),  # a type that has neither options nor tensors
        ({"a": nn.Tanh()}, {"b": nn.Tanh()}, 2),
        ({"a": 1.0}, {"a": 2.0}, 1),  # a value
        ({"a": 1.0}, {}, 2),
        ({"a": nn.Parameter(torch.ones(2))}, {"a": nn.Parameter(torch.zeros(2))}, 1),
        ({"a": nn.Parameter(torch.ones(2))}, {"a": nn.Parameter(torch.ones(3))}, 2),
    ],
    ids=["same", "option", "type", "name", "value", "presence", "parameter", "shape"],
)
def test_blocks_share_a_structure_exactly_when_one_graph_serves_both(
    first: Parts, other: Parts, structures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = type("Pair", (Tagged,), {"own_parts": (first, other)})
    monkeypatch.setitem(registry.SCHEMES.classes, "guest", scheme)
    model: Transformer = build(ModelConfig(**MODEL | {"M": 3}), 32, 0)
    assert model.structures == structures
