"""The scheme contract: every registered scheme keeps it, and one that is not built here fits into it.

SiameseNorm needs two streams. It is written here in a few lines and held against an independent reference, so that the
contract need not be torn out for it.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.attention import Context
from normscale.models.builder import build
from normscale.models.plan import resolve
from normscale.models.stack import Transformer
from normscale.norms import norm_names
from normscale.ops.statistics import Buffers
from normscale.schemes import Depth, Make, Own, Parts, Scheme, Site, Streams, find_scheme, registry, scheme_names
from tests.schemes.forms import built, fits

SIZE = {"M": 4, "d": 16, "heads": 2, "context": 8}
TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))


class Siamese(Scheme):
    """O = F(X + LN_Y(Y)); X' = LN_X(X + O); Y' = Y + O; out = X + LN(Y) (arXiv:2602.08064)."""

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        return {"x": make.norm(), "y": make.norm()}

    def own_ends(self, depth: Depth, side: str, make: Make) -> Parts:
        return {"y": make.norm()}

    def enter(self, emb: Tensor, ends: Own) -> Streams:
        return (emb, emb.clone())

    def read(self, streams: Streams, own: Own) -> Tensor:
        return streams[0] + own.module("y")(streams[1])

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        return (own.module("x")(streams[0] + out), streams[1] + out)

    def exit(self, streams: Streams, ends: Own) -> Tensor:
        return streams[0] + ends.module("y")(streams[1])


GUESTS: dict[str, type[Scheme]] = {"siamese-guest": Siamese}
# Block structures of a decoder, each a compiled graph, where a block is an exception; all others have one.
STRUCTURES = {"keel": 2, "mixln": 2, "spannorm": 2}


@pytest.fixture(autouse=True)
def guests() -> Iterator[None]:
    for name, cls in GUESTS.items():
        registry.register(name)(cls)
    yield
    for name in GUESTS:
        del registry.SCHEMES.classes[name]


def ln(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()


def reference(model: Transformer, x: Tensor) -> Tensor:
    y = x
    for sublayer in model.sublayers():
        out = sublayer.branch(x + ln(y), Context())
        x, y = ln(x + out), y + out
    return x + ln(y)


@pytest.mark.parametrize("name", GUESTS)
def test_a_guest_scheme_equals_its_formula(name: str) -> None:
    model = build(ModelConfig(**SIZE, scheme=name, positions="learned"), 32, 0)
    assert model.position is not None
    x = model.token[TOKENS] * 4.0 + model.position
    torch.testing.assert_close(model.features(TOKENS), reference(model, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", GUESTS)
def test_a_guest_scheme_is_measured_in_all_its_streams(name: str) -> None:
    model = build(ModelConfig(**SIZE, scheme=name), 32, 0)
    rows = torch.full((8 * model.rows_per_site, 3), -1.0)
    model(TOKENS, Buffers(rows))
    assert model.stream_count == 2
    assert (rows >= 0).all()


def empty(model: Transformer) -> Buffers:
    """All that a pass through the model can be asked for."""
    rows = len(model.sites()) * model.rows_per_site
    samples = torch.zeros(len(model.blocks) + (2 if model.depth.N and model.depth.M else 1), 16, model.d)
    return Buffers(*(torch.zeros(rows, columns) for columns in (3, 3, 1, 2)), samples)


def every_scheme() -> list[str]:
    return [*scheme_names(), *GUESTS]


def has(name: str, **settings: object) -> bool:
    """As `fits`; guests, which are not registered when tests are collected, follow all settings."""
    return name in GUESTS or fits(**SIZE, scheme=name, **settings)


@pytest.mark.parametrize(("name", "norm"), [(s, n) for s in every_scheme() for n in norm_names() if has(s, norm=n)])
def test_gradients_reach_every_parameter(name: str, norm: str) -> None:
    model = built(**SIZE, scheme=name, norm=norm)
    model(TOKENS).square().mean().backward()
    for parameter, p in model.named_parameters():
        assert p.grad is not None, parameter
        assert torch.isfinite(p.grad).all(), parameter


@pytest.mark.parametrize("name", every_scheme())
def test_recomputing_activations_changes_nothing(name: str) -> None:
    plain, checkpointed = (build(ModelConfig(**SIZE, scheme=name, checkpointing=c), 32, 0) for c in (False, True))
    filled = [empty(plain) for _ in range(2)]
    for model, to in zip((plain, checkpointed), filled, strict=True):
        model(TOKENS, to).square().mean().backward()
    for one, other in zip(*filled, strict=True):
        assert torch.equal(one, other)
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", every_scheme())
def test_a_saved_model_loads_into_a_fresh_one(name: str) -> None:
    one, other = build(ModelConfig(**SIZE, scheme=name), 32, 0), build(ModelConfig(**SIZE, scheme=name), 32, 1)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(TOKENS), other(TOKENS))


@pytest.mark.parametrize("name", every_scheme())
def test_one_graph_for_each_structure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: real(f, backend="eager", fullgraph=True))
    for eps in (1e-5, 1e-3, 1e-1):  # a sweep over eps must not add graphs, and must not be baked in
        if not has(name, eps=eps):
            break  # its norms have none
        config = ModelConfig(**SIZE | {"M": 12}, scheme=name, eps=eps)
        eager, compiled = build(config, 32, 0), build(config.model_copy(update={"compile": True}), 32, 0)
        counters.clear()
        torch.testing.assert_close(compiled(TOKENS), eager(TOKENS), rtol=1e-4, atol=1e-5)
        if eps == 1e-5:
            assert counters["stats"]["unique_graphs"] == compiled.structures
            assert compiled.structures == STRUCTURES.get(name, 1)
            filled, want = (empty(eager) for _ in range(2))
            # Statistics are asked for after compiling, not before: they must not stay empty.
            compiled(TOKENS, filled).square().mean().backward()
            assert counters["stats"]["unique_graphs"] == 2 * compiled.structures
            eager(TOKENS, want).square().mean().backward()
            for field, values in filled._asdict().items():
                bound = 0.0 if field == "grad_rows" else 1e-4
                torch.testing.assert_close(values, getattr(want, field), rtol=1e-4, atol=bound, msg=field)
        else:
            assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize("name", [name for name in every_scheme() if has(name, eps=0.125)])
def test_eps_reaches_every_norm(name: str) -> None:
    model = built(**SIZE, scheme=name, eps=0.125)
    found = [m.eps for m in model.modules() if hasattr(m, "eps_tensor")]
    assert len(found) >= 8
    assert set(found) == {0.125}


def test_an_unknown_scheme_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'deepnrom' is not a scheme; did you mean 'deepnorm'\? \(allowed: .*post"):
        resolve(ModelConfig(scheme="deepnrom"))


def test_an_extra_norm_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ConfigError, match=r"scheme_options.pre_norm: makes no sense with scheme=deepnorm: .*scheme=pre"
    ):
        resolve(ModelConfig(scheme="deepnorm", scheme_options={"pre_norm": True}))


@pytest.mark.parametrize("name", scheme_names())
def test_a_final_norm_can_be_left_out_or_why_not_is_said(name: str) -> None:
    kind, settings = find_scheme(name), SIZE | {"scheme": name, "scheme_options": {"final_norm": False}}
    if "final_norm" in kind.Options.model_fields:
        assert not [*built(**settings).ends.parameters()]
        assert [*built(**settings | {"scheme_options": {}}).ends.parameters()]
        return
    says = f"makes no sense with scheme={name}: " if kind.has_norms else f"{name} has no option 'final_norm'"
    with pytest.raises(ConfigError, match=rf"model.scheme_options.final_norm: {says}"):
        resolve(ModelConfig(**settings))


def test_an_unknown_option_is_refused_with_the_options_there_are() -> None:
    with pytest.raises(ConfigError, match=r"norm_options.biass: layernorm has no option 'biass'; did you mean 'bias'"):
        resolve(ModelConfig(norm_options={"biass": False}))
    with pytest.raises(ConfigError, match=r"scheme_options.warm: tfixup has no option 'warm' \(it has no options\)"):
        resolve(ModelConfig(scheme="tfixup", scheme_options={"warm": 1}))
    with pytest.raises(ConfigError, match=r"norm_options.bias: 'maybe'"):
        resolve(ModelConfig(norm_options={"bias": "maybe"}))
