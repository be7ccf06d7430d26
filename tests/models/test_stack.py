"""The stack: what it computes, how deep it goes, what it costs to compile."""

import math
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from normscale.config.precision import PrecisionConfig
from normscale.config.schema import ModelConfig
from normscale.models import stack
from normscale.models.attention import Context, rotary_tables, rotate
from normscale.models.builder import build
from normscale.models.feedforward import default_ffn_width
from normscale.models.init import weights
from normscale.schemes import Depth, Role, Scheme, Site, registry
from normscale.train.engines.plain import PlainEngine

SMALL = {"M": 2, "d": 16, "heads": 2, "context": 8}


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_every_variant_has_the_shape_and_depends_on_the_past_alone(
    activation: str, positions: str, tied: bool, bias: bool
) -> None:
    model = build(ModelConfig(**SMALL, activation=activation, positions=positions, tied=tied, bias=bias), 32, 0)
    tokens = torch.randint(0, 32, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 32
    one, other = model(tokens), model(changed)
    assert one.shape == (2, 8, 32)
    torch.testing.assert_close(one[:, :5], other[:, :5])
    assert ((one - other)[:, 5:].abs().amax(dim=(0, 2)) > 1e-6).all()
    names = [name for name, _ in model.named_parameters()]
    assert ("logits" in names) is not tied
    assert any(name.endswith("qkv.bias") for name in names) is bias


@pytest.mark.parametrize("scheme", ["deepnorm", "pre", "ngpt"])
@pytest.mark.parametrize("positions", ["rope", "sinusoidal"])
def test_constants_stay_wide_where_a_model_is_cast(scheme: str, positions: str) -> None:
    model = build(ModelConfig(**SMALL, scheme=scheme, positions=positions), 32, 0)
    tokens, before = torch.arange(8)[None], {name: buffer.clone() for name, buffer in model.named_buffers()}
    want = model(tokens)
    model.bfloat16()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
        assert buffer.dtype is before[name].dtype, name
    got = model(tokens)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=0.1, atol=0.1)


def test_attention_equals_its_formula() -> None:
    attention = build(ModelConfig(**SMALL), 32, 0).sublayers()[0].branch
    x, rotary = torch.randn(2, 8, 16), rotary_tables(8, 8)
    q, k, v = (F.linear(x, w).view(2, 8, 2, 8).transpose(1, 2) for w in attention.qkv.weight.chunk(3))
    scores = rotate(q, rotary) @ rotate(k, rotary).transpose(-1, -2) / 8**0.5
    weights = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf).softmax(-1)
    y = F.linear((weights @ v).transpose(1, 2).reshape(2, 8, 16), attention.o.weight)
    torch.testing.assert_close(attention(x, Context(rotary)), y, rtol=1e-4, atol=1e-5)


def test_rotary_scores_depend_on_distance_alone() -> None:
    q, k, tables = torch.randn(8).expand(12, 8), torch.randn(8).expand(12, 8), rotary_tables(12, 8)
    scores = rotate(q, tables) @ rotate(k, tables).T
    for distance in range(-5, 6):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_gated_and_plain_layers_cost_alike() -> None:
    assert [default_ffn_width(64, plain) for plain in ("gelu", "relu")] == [256, 256]
    assert [default_ffn_width(d, gated) for gated in ("swiglu", "geglu") for d in (64, 96)] == [176, 256, 176, 256]


@pytest.mark.parametrize("d", [8, 7])
def test_sinusoids_are_those_of_the_paper(d: int) -> None:
    table = stack.sinusoids(5, d)
    for t in range(5):
        for channel in range(d):
            angle = t / 10_000 ** ((channel - channel % 2) / d)
            want = math.cos(angle) if channel % 2 else math.sin(angle)
            assert float(table[t, channel]) == pytest.approx(want, abs=1e-6)


SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
ENTERS = {"scheme": "guest", "N": 1, "M": 1, "embedding_norm": True, "segments": 2}


@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal"])
def test_what_enters_a_side_is_the_normed_sum_of_its_vectors(positions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.SCHEMES.classes, "guest", Scheme)  # no norms: the streams enter as they are
    model = build(ModelConfig(**SMALL | ENTERS, positions=positions), 32, 0)
    tokens, source, outputs = torch.randint(0, 32, (1, 8)), torch.randint(0, 32, (1, 6)), []
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        model.features(tokens, source_BS=source, segments_BT=SEGMENTS, outputs=outputs)

    def entered(ids: torch.Tensor, position: torch.Tensor | None, norm: Any) -> torch.Tensor:
        x = model.token[ids] * 4.0
        if positions != "rope":
            x = x + (model.sinusoids if position is None else position)[: ids.shape[1]]
        if ids is tokens:
            x = x + model.segment[SEGMENTS]
        return F.layer_norm(x, (16,), norm.gamma, norm.bias, 1e-5)

    torch.testing.assert_close(outputs[0], entered(source, model.source_position, model.source_embedding_norm))
    torch.testing.assert_close(outputs[2], entered(tokens, model.position, model.embedding_norm))
    assert (model.position is None) is (model.source_position is None) is (positions != "learned")


@pytest.mark.parametrize(
    ("options", "inputs", "says"),
    [
        ({}, {"source_BS": SEGMENTS}, "source_BS: a model with N=0 M=2 segments=0 does not read it"),
        ({"N": 1}, {}, "source_BS: a model with N=1 M=2 segments=0 reads it"),
        ({"N": 1, "M": 0}, {"source_BS": SEGMENTS}, "source_BS: .* does not read it"),
        ({}, {"source_keep_BS": SEGMENTS.bool()}, "source_keep_BS: .* does not read it"),
        ({}, {"segments_BT": SEGMENTS}, "segments_BT: .* does not read it"),
        ({"N": 1, "M": 0, "segments": 2}, {}, "segments_BT: a model with N=1 M=0 segments=2 reads it"),
    ],
)
def test_inputs_that_a_model_does_not_read_or_lacks_are_refused(options: Any, inputs: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build(ModelConfig(**SMALL | options), 32, 0)(SEGMENTS, **inputs)


@pytest.mark.parametrize(("N", "M"), [(0, 3), (3, 0), (2, 3)])
def test_a_block_is_passed_over_and_outputs_are_those_after_every_block(N: int, M: int) -> None:
    model = build(ModelConfig(**SMALL | {"N": N, "M": M}, scheme="pre"), 32, 0)
    tokens = torch.randint(0, 32, (2, 8))
    beside = {"source_BS": torch.randint(0, 32, (2, 6))} if N and M else {}
    whole: list[torch.Tensor] = []
    want = model.features(tokens, **beside, outputs=whole)
    first = N + 1 if N and M else 0  # the decoder's own embedding
    assert len(whole) == first + (M or N) + 1
    assert not any(x.requires_grad for x in whole)
    torch.testing.assert_close(model.scheme.exit((whole[-1],), model.ends), want)
    for skip in range(N + M):
        outputs: list[torch.Tensor] = []
        x = model.features(tokens, **beside, skip=skip, outputs=outputs)
        assert len(outputs) == len(whole)
        before = skip + (1 if N and M and skip >= N else 0)
        assert torch.equal(outputs[before], whole[before])
        assert torch.equal(outputs[before + 1], outputs[before])
        assert not torch.equal(x, want)
        assert torch.equal(model(tokens, **beside, skip=skip), F.linear(x, model.token))


@pytest.mark.parametrize(("N", "M"), [(0, 3), (3, 0), (2, 3)])
def test_a_site_knows_the_norm_that_comes_after_it(N: int, M: int) -> None:
    model = build(ModelConfig(**SMALL | {"N": N, "M": M}, scheme="pre"), 32, 0)
    owns, ends = [s.own for s in model.sublayers()], model.ends
    cut = 2 * N if N and M else len(owns)
    sides = [(owns[:cut], model.source_ends if N and M else ends), (owns[cut:], ends)]
    for own, last in sides:
        for i, one in enumerate(own):
            assert one.after is (own[i + 1] if i + 1 < len(own) else last).module("norm")
        if own:
            assert last.after is own[0].module("norm")
    assert not any("after" in name for name, _ in model.named_modules(remove_duplicate=False))
    assert model.structures == (2 if N and M else 1)


@pytest.mark.parametrize("options", [{"checkpointing": True}, {}])
def test_blocks_that_are_on_their_own_know_no_norm_of_another(options: Any) -> None:
    class Gathering(PlainEngine):
        gathers = True

    model = build(ModelConfig(**SMALL, scheme="pre", **options), 32, 0)
    if not options:
        Gathering(model, PrecisionConfig(), torch.device("cpu"))
    owns = [s.own for s in model.sublayers()]
    assert model.ends.after is None
    assert [own.after for own in owns] == [owns[1].module("norm"), None, owns[3].module("norm"), None]


def test_the_stream_starts_at_unit_rms() -> None:
    model = build(ModelConfig(M=1, d=256, heads=4), 256, 0)
    x = model.token.detach()[torch.arange(256)] * 16.0
    assert float(x.square().mean().sqrt()) == pytest.approx(1.0, abs=0.02)


def test_the_seed_alone_decides_the_values() -> None:
    torch.manual_seed(1)
    one = build(ModelConfig(**SMALL), 32, 5)
    torch.manual_seed(2)
    same, other = build(ModelConfig(**SMALL), 32, 5), build(ModelConfig(**SMALL), 32, 6)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.token, other.token)


@pytest.mark.parametrize("init", ["xavier_normal", "xavier_uniform", "normal"])
def test_the_init_has_its_deviation(init: str) -> None:
    model = build(ModelConfig(M=1, d=128, heads=2, scheme="pre", init=init, init_std=0.02), 256, 0)
    up = model.sublayers()[1].branch.up.weight
    expected = 0.02 if init == "normal" else (2 / (128 + 512)) ** 0.5
    assert float(up.std()) == pytest.approx(expected, rel=0.03)
    assert (float(up.abs().max()) < 3**0.5 * expected * 1.001) is (init == "xavier_uniform")


@pytest.mark.parametrize("init", ["xavier_normal", "xavier_uniform", "normal"])
def test_the_gain_multiplies_the_deviation_of_every_init(init: str) -> None:
    model = build(ModelConfig(M=2, d=128, heads=2, scheme="deepnorm", init=init), 256, 0)
    ratios: dict[str, list[float]] = {}
    for entry in weights(model):
        if entry.site is not None and not entry.role.bias:
            standard = 0.02 if init == "normal" else (2 / sum(entry.values.shape)) ** 0.5
            ratios.setdefault(entry.role.part, []).append(float(entry.values.std()) / standard)
    beta = 0.5  # (8 x 2)^(-1/4)
    for part, gain in {"q": 1.0, "k": 1.0, "v": beta, "o": beta, "in": beta, "out": beta}.items():
        assert ratios[part] == pytest.approx([gain, gain], rel=0.03), part


def test_vectors_at_the_ends_have_deviation_gain_over_root_width(monkeypatch: pytest.MonkeyPatch) -> None:
    class Guest(Scheme):
        def gain(self, depth: Depth, site: Site | None, role: Role) -> float:
            return {"token": 0.5, "position": 2.0, "logits": 3.0}.get(role.part, 1.0)

    monkeypatch.setitem(registry.SCHEMES.classes, "guest", Guest)
    config = ModelConfig(M=1, d=64, heads=1, context=256, tied=False, positions="learned")
    plain, scaled = (build(config.model_copy(update={"scheme": scheme}), 256, 0) for scheme in ("post", "guest"))
    for name, gain in {"token": 0.5, "position": 2.0, "logits": 3.0}.items():
        deviations = [float(getattr(model, name).detach().std()) for model in (plain, scaled)]
        assert deviations == pytest.approx([1 / 8, gain / 8], rel=0.03), name


@pytest.mark.parametrize(("checkpointing", "calls"), [(True, 3), (False, 0)])
def test_each_block_is_checkpointed_where_asked_and_gradients_are_wanted(
    checkpointing: bool, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = stack.checkpoint, []
    monkeypatch.setattr(stack, "checkpoint", lambda *a, **k: seen.append(a) or real(*a, **k))
    model = build(ModelConfig(**SMALL | {"M": 3}, checkpointing=checkpointing), 32, 0)
    tokens = torch.randint(0, 32, (2, 8))
    with torch.no_grad():
        model(tokens)
    assert seen == []
    model(tokens).sum().backward()
    assert len(seen) == calls


def test_a_thousand_blocks_need_no_deeper_recursion() -> None:
    raised = sys.getrecursionlimit()  # by a compiler that an earlier test has loaded, perhaps
    sys.setrecursionlimit(1000)
    try:
        _a_thousand_blocks()
    finally:
        sys.setrecursionlimit(raised)


def _a_thousand_blocks() -> None:
    model = build(ModelConfig(M=1000, d=8, heads=1, context=4), 16, 0)
    loss = model(torch.randint(0, 16, (1, 4))).square().mean()
    loss.backward()
    gradients = [p.grad for p in model.blocks[0].parameters()]
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)
    assert model.structures == 1
    assert len(model.sites()) == 2000


@pytest.mark.slow
def test_inductor_agrees_with_eager_and_compiles_once() -> None:
    from torch._dynamo.utils import counters

    config = ModelConfig(**SMALL | {"M": 12})
    eager, compiled = build(config, 32, 0), build(config.model_copy(update={"compile": True}), 32, 0)
    tokens = torch.randint(0, 32, (2, 8))
    counters.clear()
    for model in (eager, compiled):
        model(tokens).square().mean().backward()
    assert counters["stats"]["unique_graphs"] == 1
    for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)
