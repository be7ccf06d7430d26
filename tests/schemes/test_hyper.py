"""Hyper-connections and mHC against their formulas, Pre-Norm as a special case, and what Sinkhorn leaves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.builder import build
from normscale.models.init import gain_of, weights
from normscale.models.plan import resolve
from normscale.ops.statistics import Buffers
from normscale.schemes import Depth, Role
from normscale.schemes.hyper import HyperConnections, sinkhorn
from tests.schemes.written import FORMS, TOKENS, branch, compare, ln, made

KINDS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"dynamic": False},
    "mhc": {"form": "mhc", "iterations": 7},
}


def hc(H: Tensor, mix: Any, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """B, A_m and A_r as Appendix J makes them, of streams [B, T, n, D]."""
    if mix.norm is None:
        return mix.b, mix.a, mix.r.view(n, n)
    x = ln(H, mix.norm)
    b, a = (torch.tanh(x @ w.T).squeeze(-1) for w in (mix.to_b, mix.to_a))
    return (
        mix.b + mix.gate_b * b,
        mix.a + mix.gate_a * a,
        mix.r.view(n, n) + mix.gate_a * torch.tanh(torch.einsum("btid,jd->btij", x, mix.to_r)),
    )


def mhc(H: Tensor, mix: Any, n: int) -> tuple[Tensor, Tensor, Tensor]:
    x = ln(H.flatten(-2), mix.norm)
    a = torch.sigmoid(mix.gate_a * (x @ mix.to_a.T) + mix.a) + 1e-6
    b = 2 * torch.sigmoid(mix.gate_b * (x @ mix.to_b.T) + mix.b)
    r = torch.exp((mix.gate_r * (x @ mix.to_r.T) + mix.r).view(*x.shape[:2], n, n))
    for _ in range(7):  # rows, then columns: Megatron's order; its 1e-6 is within the tolerance
        r = r / r.sum(-1, keepdim=True)
        r = r / r.sum(-2, keepdim=True)
    return b, a, r


def stack_of(kind: str, n: int) -> Any:
    def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
        H = torch.stack([x] * n, dim=-2)
        for layer in layers:
            b, a, r = (mhc if kind == "mhc" else hc)(H, layer.own.mix, n)
            h0 = (a.unsqueeze(-1) * H).sum(-2)
            out = branch(layer, ln(h0, layer.own.norm))
            H = (r.unsqueeze(-1) * H.unsqueeze(-2)).sum(-3) + b.unsqueeze(-1) * out.unsqueeze(-2)
        return ln(H.mean(-2) if kind == "mhc" else H.sum(-2), ends.norm)

    return stack


@pytest.mark.parametrize("form", ["encoder", "decoder"])
@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_stack_equals_its_formula(kind: str, n: int, form: str) -> None:
    model = made("hyper", *FORMS[form], **KINDS[kind] | {"streams": n})
    compare(model, stack_of(kind, n), tolerance=1e-4 if kind == "mhc" else 1e-6)


@pytest.mark.parametrize("dynamic", [True, False])
def test_one_stream_of_identity_maps_is_pre_norm(dynamic: bool) -> None:
    pre, hyper = (
        build(ModelConfig(M=3, d=16, heads=2, context=8, scheme=name, scheme_options=options), 32, 0)
        for name, options in (("pre", {}), ("hyper", {"streams": 1, "dynamic": dynamic}))
    )
    assert torch.equal(pre(TOKENS), hyper(TOKENS))


def test_at_init_n_streams_are_copies_of_a_pre_norm_one_whichever_each_site_reads() -> None:
    options = {"out_init": "none"}
    pre, hyper = (
        build(ModelConfig(M=5, d=16, heads=2, context=8, eps=0.0, scheme=name, scheme_options=o), 32, 0)
        for name, o in (("pre", {}), ("hyper", options))
    )
    torch.testing.assert_close(pre(TOKENS), hyper(TOKENS), rtol=1e-4, atol=1e-4)
    for i, sublayer in enumerate(hyper.sublayers()):
        mix = sublayer.own.mix
        assert mix.a.tolist() == [float(j == i % 4) for j in range(4)]
        assert torch.equal(mix.b, torch.ones(4))
        assert torch.equal(mix.r.view(4, 4), torch.eye(4))
        assert not any(to.any() for to in (mix.to_a, mix.to_b, mix.to_r))
    with torch.no_grad():
        hyper.sublayers()[2].own.mix.r[1] = 0.5  # no identity any more
    assert (pre(TOKENS) - hyper(TOKENS)).abs().max() > 1e-2


def test_what_depends_on_the_input_begins_at_a_hundredth() -> None:
    for form, gates in (("hc", ("gate_a", "gate_b")), ("mhc", ("gate_a", "gate_b", "gate_r"))):
        size = {"M": 1, "d": 64, "heads": 2, "context": 8, "scheme": "hyper"}
        mix = build(ModelConfig(**size, scheme_options={"form": form}), 32, 0).sublayers()[0].own.mix
        assert {name: p.tolist() for name, p in mix.named_parameters() if name.startswith("gate")} == {
            gate: pytest.approx([0.01]) for gate in gates
        }
        if form == "mhc":
            assert not any(bias.any() for bias in (mix.a, mix.b, mix.r))
            bound = (6 / (24 + 4 * 64)) ** 0.5  # Xavier's, of all 24 rows together
            drawn = torch.cat([mix.to_a, mix.to_b, mix.to_r]).detach()
            assert 0.98 * bound < float(drawn.abs().max()) <= bound
            assert float(drawn.std()) == pytest.approx(bound / 3**0.5, rel=0.03)


@pytest.mark.parametrize("N", [1, 6, 18, 100, 1000])
@pytest.mark.parametrize(("out_init", "gain"), [("divide", 0.5), ("multiply", 2.0), ("none", 1.0)])
def test_gains_of_what_writes_the_streams(out_init: str, gain: float, N: int) -> None:
    scheme, plain = (HyperConnections(HyperConnections.Options(**o)) for o in ({"out_init": out_init}, {"form": "mhc"}))
    for depth in (Depth(N, 0), Depth(0, N)):
        for site, kind, parts in (
            (depth.sites()[-2], "self", "q k v o latent"),
            (depth.sites()[-1], "ffn", "in gate out"),
        ):
            for part in parts.split():
                role = Role(kind, part)  # type: ignore[arg-type]
                assert scheme.gain(depth, site, role) == (gain if part in ("o", "out") else 1.0)
                assert plain.gain(depth, site, role) == 1.0
        assert scheme.gain(depth, None, Role("embedding", "token")) == 1.0


def test_every_weight_is_drawn_by_its_gain() -> None:
    model = build(ModelConfig(M=2, d=16, heads=2, context=8, scheme="hyper", scheme_options={"streams": 9}), 32, 0)
    gains = {weight.role.part: gain_of(model, weight, scaled=False) for weight in weights(model)}
    assert gains == {"token": 1.0, "q": 1.0, "k": 1.0, "v": 1.0, "o": 1 / 3, "in": 1.0, "out": 1 / 3}


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_sinkhorn_leaves_a_doubly_stochastic_matrix(scale: float) -> None:
    logits = scale * torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0))
    m = sinkhorn(logits, 200)
    assert (m >= 0).all()
    ones = torch.ones(50, 4)
    torch.testing.assert_close(m.sum(-2), ones, rtol=0, atol=1e-4)
    torch.testing.assert_close(m.sum(-1), ones, rtol=0, atol=2e-2 if scale == 5.0 else 1e-4)
    if scale >= 1.0:  # one iteration is not enough: rows are still off
        assert (sinkhorn(logits, 1).sum(-1) - 1).abs().max() > 0.1
    assert torch.isfinite(sinkhorn(1e4 * logits, 20)).all()


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_an_iteration_is_rows_and_then_columns(iterations: int) -> None:
    logits = 3.0 * torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    m = logits.exp()
    for _ in range(iterations):
        m = m / m.sum(-1, keepdim=True)
        m = m / m.sum(-2, keepdim=True)
    torch.testing.assert_close(sinkhorn(logits, iterations), m, rtol=0, atol=2e-3)  # it adds 1e-6 to every sum
    assert (sinkhorn(logits, iterations + 1) - m).abs().max() > 1e-2


def test_no_stream_grows_through_mhcs_mixing_and_through_a_free_one_it_may() -> None:
    """A product of doubly stochastic matrices is one: at most 1 comes of 1, at whatever depth."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(100, 4, 4, generator=generator, dtype=torch.float64)
    mixed = torch.linalg.multi_dot(list(sinkhorn(logits, 20)))
    free = torch.linalg.multi_dot(list(torch.eye(4, dtype=torch.float64) + 0.2 * logits))
    assert mixed.sum(-2).max() < 1.01
    assert free.abs().sum(-2).max() > 10


def test_streams_stay_wide_where_products_are_narrow() -> None:
    model = build(ModelConfig(M=2, d=16, heads=2, context=8, scheme="hyper", scheme_options={"form": "mhc"}), 32, 0)
    types: set[torch.dtype] = set()
    for sublayer in model.sublayers():
        sublayer.register_forward_hook(lambda module, given, out: types.update(x.dtype for x in out))
    with torch.autocast("cpu", torch.bfloat16):
        narrow = model.features(TOKENS)
    assert types == {torch.float32}
    torch.testing.assert_close(narrow.float(), model.features(TOKENS), rtol=0.05, atol=0.05)


def test_every_stream_is_measured_in_a_row_of_its_own() -> None:
    model = made("hyper", 0, 2, streams=3).float()
    assert (model.stream_count, model.rows_per_site) == (3, 4)
    rows = torch.zeros(4 * 4, 3)
    seen: list[Tensor] = []
    for sublayer in model.sublayers():
        sublayer.register_forward_hook(lambda m, given, out: seen.append(torch.stack([x.square().sum() for x in out])))
    model(TOKENS, Buffers(rows))
    torch.testing.assert_close(rows.view(4, 4, 3)[:, 1:, 0], torch.stack(seen).detach())
    assert rows[1:4, 0].std() > 0


def test_what_the_paper_does_not_decay_is_in_vectors() -> None:
    for options in ({}, {"form": "mhc"}):
        model = build(ModelConfig(M=1, d=16, heads=2, context=8, scheme="hyper", scheme_options=options), 32, 0)
        mix = model.sublayers()[0].own.mix
        shapes = {name: p.dim() for name, p in mix.named_parameters() if not name.startswith("norm")}
        assert {name for name, dim in shapes.items() if dim == 2} == {"to_a", "to_b", "to_r"}
        assert {"a", "b", "r"} <= {name for name, dim in shapes.items() if dim == 1}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"scheme_options": {"form": "mhc", "dynamic": False}}, "dynamic would do nothing with form=mhc; remove it or"),
        ({"scheme_options": {"form": "mhc", "out_init": "none"}}, "out_init would do nothing with form=mhc"),
        ({"scheme_options": {"iterations": 5}}, "iterations would do nothing with form=hc; .* set form=mhc"),
        ({"scheme_options": {"streams": 0}}, "model.scheme_options.streams: 0: "),
        ({"N": 2}, "model.scheme: 'hyper' has no encoder-decoder form"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(ModelConfig(**{"M": 2, "scheme": "hyper"} | settings))
