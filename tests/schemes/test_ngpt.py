"""nGPT against its formula, lengths before and after steps, and what makes no sense with it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.builder import build
from normscale.models.init import weights
from normscale.models.plan import resolve
from normscale.schemes import Depth, Role
from normscale.schemes.ngpt import NGPT, unit
from tests.schemes.written import TOKENS
from tests.train.test_loop import trainer

SIZE = {"M": 3, "d": 16, "heads": 2, "context": 8, "scheme": "ngpt"}


def model_of(**settings: Any) -> Any:
    """A model in fp64 as it stands before the first step, with vectors and biases that are not what they start as.

    Of the steps some are below 0.
    """
    model = build(ModelConfig(**SIZE | settings), 32, 0).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        model.scheme.after_step(list(weights(model)))
    return model


def justnorm(x: Tensor) -> Tensor:
    return x / x.norm(p=2, dim=-1, keepdim=True)


def rotated(x_BTHK: Tensor) -> Tensor:
    T, K = x_BTHK.shape[1], x_BTHK.shape[-1]
    angle = torch.outer(torch.arange(T).double(), 10_000.0 ** (-torch.arange(0, K, 2).double() / K))
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    low, high = x_BTHK[..., : K // 2], x_BTHK[..., K // 2 :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def attention(h: Tensor, branch: Any, heads: int, causal: bool) -> Tensor:
    B, T, D = h.shape
    q, k, v = F.linear(h, branch.qkv.weight, branch.qkv.bias).view(B, T, 3, heads, D // heads).unbind(2)
    base = D**-0.5
    s_qk = (branch.slots["attn_scale"].s_qk.stored * (1.0 / base)).view(1, 1, heads, D // heads)
    q, k = s_qk * justnorm(rotated(q)), s_qk * justnorm(rotated(k))  # as the release: scaled after the position
    logits = torch.einsum("bthk,bshk->bhts", q, k) * (D // heads) ** 0.5
    if causal:
        logits = logits.masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf)
    y = torch.einsum("bhts,bshk->bthk", logits.softmax(-1), v).reshape(B, T, D)
    return F.linear(y, branch.o.weight, branch.o.bias)


def feed_forward(h: Tensor, branch: Any, gated: bool) -> Tensor:
    up = F.linear(h, branch.up.weight, branch.up.bias) * branch.slots["before_act"].stored * h.shape[-1] ** 0.5
    if gated:
        gate, u = up.chunk(2, dim=-1)
        up = u * F.silu(gate)
    else:
        up = F.gelu(up)
    return F.linear(up, branch.out.weight, branch.out.bias)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("activation", "tied", "bias"), [("swiglu", False, False), ("gelu", True, True)])
def test_the_logits_equal_the_releases(activation: str, tied: bool, bias: bool, causal: bool) -> None:
    side = {} if causal else {"N": 3, "M": 0}
    model = model_of(activation=activation, tied=tied, bias=bias, **side)
    h = justnorm(model.token[TOKENS])
    assert any((sublayer.own.step.stored < 0).any() for sublayer in model.sublayers())
    for sublayer in model.sublayers():
        if sublayer.attends:
            out = attention(h, sublayer.branch, 2, causal)
        else:
            out = feed_forward(h, sublayer.branch, activation == "swiglu")
        alpha = (sublayer.own.step.stored * (0.05 / 16**-0.5)).abs()
        h = justnorm(justnorm(h) + alpha * (justnorm(out) - justnorm(h)))
    head = model.token if tied else model.logits
    s_z = model.ends.logit_scale / 16**-0.5
    torch.testing.assert_close(model(TOKENS), s_z * (h @ head.T), rtol=1e-6, atol=1e-6)


def test_every_vector_starts_as_the_paper_says() -> None:
    model = build(ModelConfig(**SIZE, activation="swiglu"), 32, 0)
    for sublayer in model.sublayers():
        torch.testing.assert_close(sublayer.own.step.value(), torch.full((16,), 0.05))
        slots = sublayer.branch.slots
        if sublayer.attends:
            torch.testing.assert_close(slots["attn_scale"].s_qk.value(), torch.ones(16))
            assert slots["attn_scale"].s_qk.stored[0].item() == pytest.approx(0.25)
        else:
            torch.testing.assert_close(slots["before_act"].value(), torch.full((2 * 48,), 4.0))
            assert slots["before_act"].stored[0].item() == 1.0
    torch.testing.assert_close(model.ends.logit_scale, torch.full((32,), 0.25))
    small = build(ModelConfig(**SIZE, scheme_options={"step": 0.01}), 32, 0)
    torch.testing.assert_close(small.sublayers()[0].own.step.value(), torch.full((16,), 0.01))


def test_the_state_has_length_1_at_every_site_and_its_rms_is_1_at_the_end() -> None:
    model = model_of()
    lengths: list[Tensor] = []
    for sublayer in model.sublayers():
        sublayer.register_forward_hook(lambda module, given, out: lengths.append(out[0].norm(dim=-1)))
    y = model.features(TOKENS)
    assert len(lengths) == 6
    assert all(torch.allclose(found, torch.ones_like(found)) for found in lengths)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(2, 8).double())


def test_projection_takes_rows_of_what_reads_the_state_and_columns_of_what_writes_it() -> None:
    model = build(
        ModelConfig(**SIZE, activation="swiglu", positions="learned", segments=2, tied=False).model_copy(), 32, 0
    )
    drawn = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        model.scheme.after_step(list(weights(model)))
    along = {"o": 0, "out": 0}
    seen = set()
    for weight in weights(model):
        seen.add(weight.role.part)
        if weight.role.bias:
            assert torch.equal(weight.values, drawn[weight.name][weight.rows])
            continue
        dim = along.get(weight.role.part, 1)
        before = drawn[weight.name][weight.rows]
        torch.testing.assert_close(weight.values, before / before.norm(dim=dim, keepdim=True))
    assert seen == {"token", "position", "segment", "logits", "q", "k", "v", "o", "gate", "in", "out"}
    projected = {weight.name for weight in weights(model)}
    for name, p in model.named_parameters():
        assert name in projected or torch.equal(p, drawn[name]), name


def test_steps_keep_lengths_at_1_and_the_learning_rate_cannot_move_them() -> None:
    from tests.probes.test_probes import Notes, windows

    t = trainer(model={"scheme": "ngpt"}, optim={"lr": 0.3})
    for window in windows(3):
        before = t.engine.inner.blocks[0].sublayers["ffn"].branch.out.weight.detach().clone()
        assert t.step(window, Notes()).applied
        after = t.engine.inner.blocks[0].sublayers["ffn"].branch.out.weight.detach()
        assert (after - before).abs().max() > 1e-2
        torch.testing.assert_close(after.norm(dim=0), torch.ones(len(after.T)))


def test_zeros_stay_zeros_and_their_gradient_is_not_blown_up() -> None:
    x, given = torch.zeros(2, 4, requires_grad=True), torch.ones(2, 4)
    y = unit(x)
    y.backward(given)
    assert torch.equal(y, torch.zeros(2, 4))
    torch.testing.assert_close(x.grad, given)


@pytest.mark.parametrize("N", [1, 6, 18, 100, 1000])
def test_gains_are_1_at_every_depth(N: int) -> None:
    depth = Depth(0, N)
    parts = (("self", "q"), ("self", "o"), ("ffn", "in"), ("ffn", "out"))
    assert {NGPT().gain(depth, depth.sites()[-1], Role(kind, part)) for kind, part in parts} == {1.0}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"norm": "rmsnorm"}, "model.norm: 'rmsnorm' makes no sense with scheme=ngpt: its one norm is the length"),
        ({"norm_options": {"bias": False}}, "model.norm_options: "),
        ({"eps": 1e-3}, "model.eps: 0.001 makes no sense with scheme=ngpt: its lengths have no eps; leave it out"),
        ({"embedding_norm": True}, "model.embedding_norm: True makes no sense"),
        ({"kv_latent": 8}, "model.kv_latent: 8 makes no sense"),
        ({"init_scaled": True}, "model.init_scaled: 'all' makes no sense"),
        ({"init": "normal", "init_std": 0.1}, "model.init_std: 0.1 makes no sense"),
        ({"qk_norm": "head"}, "model.qk_norm: 'head' makes no sense with scheme=ngpt"),
        ({"N": 2}, "model.scheme: 'ngpt' has no encoder-decoder form"),
        ({"scheme_options": {"step": 0}}, "model.scheme_options.step: 0: .*greater than 0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(ModelConfig(**SIZE | settings))
