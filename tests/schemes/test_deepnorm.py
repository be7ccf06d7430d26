"""DeepNorm's constants and which parameters they reach."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.models.init import weights
from normscale.norms import find_norm
from normscale.schemes import Depth, Make, Own, Role, Site
from normscale.schemes.deepnorm import DeepNorm
from normscale.schemes.scheme import Part
from tests.schemes.written import FORMS, branch, compare, ln, made

SCHEME = DeepNorm()
SINGLE = {1: (1.18921, 0.59460), 6: (1.86121, 0.37992), 18: (2.44949, 0.28868), 100: (3.76060, 0.18803)} | {
    1000: (6.68740, 0.10574)
}
# N: alpha and beta of the encoder, of the decoder (N = M)
DOUBLE = {1: (0.81, 0.87, 1.3161, 0.5373), 6: (1.418, 0.4970, 2.060, 0.3433), 18: (1.999, 0.3526, 2.711, 0.2608)}
DOUBLE |= {100: (3.416, 0.2063, 4.162, 0.1699), 1000: (7.014, 0.1005, 7.401, 0.0955)}


@pytest.mark.parametrize("blocks", SINGLE)
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_constants_of_a_single_stack(blocks: int, side: str) -> None:
    depth = Depth(blocks, 0) if side == "encoder" else Depth(0, blocks)
    for site in depth.sites()[:2]:
        alpha, beta = SCHEME.alpha(depth, site), SCHEME.beta(depth, site)
        assert (alpha, beta) == pytest.approx(SINGLE[blocks], abs=1e-5)
        # Appendix C: 2 N (v^2 + w^2) / alpha^2 = 1 with v = w = beta, the bound on the update of one SGD step.
        assert 2 * blocks * (2 * beta**2) / alpha**2 == pytest.approx(math.sqrt(blocks) * 4 * beta**2 / math.sqrt(2))
        assert 4 * blocks * beta**2 / alpha**2 == pytest.approx(1.0)


@pytest.mark.parametrize("blocks", DOUBLE)
def test_constants_of_encoder_and_decoder(blocks: int) -> None:
    depth = Depth(blocks, blocks)
    encoder, decoder = depth.sites()[0], depth.sites()[-1]
    got = (*(f(depth, encoder) for f in (SCHEME.alpha, SCHEME.beta)), SCHEME.alpha(depth, decoder))
    assert (*got, SCHEME.beta(depth, decoder)) == pytest.approx(DOUBLE[blocks], abs=1e-3)


def test_unequal_depths_follow_the_paper() -> None:
    depth = Depth(12, 3)
    encoder, decoder = depth.sites()[0], depth.sites()[-1]
    assert SCHEME.alpha(depth, encoder) == pytest.approx(0.81 * (12**4 * 3) ** (1 / 16))
    assert SCHEME.alpha(depth, decoder) == pytest.approx(9 ** (1 / 4))
    assert SCHEME.beta(depth, encoder) == pytest.approx(0.87 * (12**4 * 3) ** (-1 / 16))
    assert SCHEME.beta(depth, decoder) == pytest.approx(36 ** (-1 / 4))


@pytest.mark.parametrize("part", ["q", "k", "v", "o"])
def test_cross_attention_is_scaled_as_self_attention(part: Part) -> None:
    depth = Depth(12, 3)
    own, cross = (site for site in depth.sites() if (site.side, site.block) == ("decoder", 1) and site.kind != "ffn")
    assert (own.kind, cross.kind) == ("self", "cross")
    expected = 36 ** (-1 / 4) if part in ("v", "o") else 1.0
    assert SCHEME.gain(depth, own, Role("self", part)) == pytest.approx(expected)
    assert SCHEME.gain(depth, cross, Role("cross", part)) == pytest.approx(expected)


VARIANTS = {
    # constants: alpha and beta of the encoder, of the decoder, at N=4, M=9; None: refused
    "paper": (0.81 * 2304 ** (1 / 16), 0.87 * 2304 ** (-1 / 16), 27 ** (1 / 4), 108 ** (-1 / 4)),
    "torchscale": (0.81 * 2304 ** (1 / 16), 1.15 * 2304 ** (-1 / 16), 27 ** (1 / 4), 108 ** (-1 / 4)),
    "article": (8 ** (1 / 4), 32 ** (-1 / 4), (16 * 4 * 81) ** (1 / 16), (16 * 4 * 81) ** (-1 / 16) / 2**0.5),
    "mixln": None,
    "keel": None,
}
# The same for a single stack of 6, as alpha and beta.
SINGLE_VARIANTS = {"mixln": (2.8284, 48 ** (1 / 4)), "keel": (12 ** (1 / 4), 12 ** (-1 / 4))}


@pytest.mark.parametrize("constants", VARIANTS)
def test_constants_that_were_published_under_the_name(constants: str) -> None:
    scheme = DeepNorm(DeepNorm.Options(constants=constants))
    for depth in (Depth(6, 0), Depth(0, 6)):
        site = depth.sites()[0]
        want = SINGLE_VARIANTS.get(constants, SINGLE[6])
        assert (scheme.alpha(depth, site), scheme.beta(depth, site)) == pytest.approx(want, abs=1e-5)
        assert scheme.unfit(depth) is None
    depth, want = Depth(4, 9), VARIANTS[constants]
    assert (scheme.unfit(depth) is None) is (want is not None)
    if want is not None:
        encoder, decoder = depth.sites()[0], depth.sites()[-1]
        got = [f(depth, site) for site in (encoder, decoder) for f in (scheme.alpha, scheme.beta)]
        assert got == pytest.approx(want)


@pytest.mark.parametrize("constants", VARIANTS)
@pytest.mark.parametrize("use", ["alpha", "beta"])
def test_one_leg_without_the_other(constants: str, use: str) -> None:
    both, one = (DeepNorm(DeepNorm.Options(constants=constants, use=u)) for u in ("both", use))
    depth = Depth(0, 6)
    site, v = depth.sites()[0], Role("self", "v")
    want = {"alpha": (both.alpha(depth, site), 1.0), "beta": (1.0, both.beta(depth, site))}[use]
    assert (one.alpha(depth, site), one.gain(depth, site, v)) == want
    assert one.own(depth, site, Make(4, 1, 4, 4, torch.nn.Identity, torch.Generator()))["alpha"] == want[0]


def test_alpha_and_beta_are_tied_in_every_row_of_the_paper() -> None:
    for depth in (Depth(1, 0), Depth(0, 1000), Depth(18, 18), Depth(12, 3)):
        for site in depth.sites():
            assert SCHEME.alpha(depth, site) * SCHEME.beta(depth, site) * 2**0.5 == pytest.approx(1.0, abs=4e-3)
    # Appendix B: the encoder's constants are 27^(-1/16) and 27^(1/16) / sqrt(2), rounded.
    assert abs(27 ** (-1 / 16) - 0.81) < 5e-3
    assert abs(27 ** (1 / 16) / 2**0.5 - 0.87) < 5e-3
    # Equations of the decoder: alpha^2 = (3M)^(1/2), 2 beta^2 = (3M)^(-1/2).
    depth = Depth(12, 3)
    last = depth.sites()[-1]
    assert SCHEME.alpha(depth, last) ** 2 == pytest.approx(9 ** (1 / 2))
    assert 2 * SCHEME.beta(depth, last) ** 2 == pytest.approx(9 ** (-1 / 2))


def test_alpha_reaches_every_site_of_both_sides() -> None:
    model = build(ModelConfig(N=4, M=9, d=16, heads=2, context=8), 32, 0)
    for sublayer in model.sublayers():
        want = VARIANTS["paper"][0 if sublayer.site.side == "encoder" else 2]
        assert float(sublayer.own.tensor("alpha")) == pytest.approx(want)


# Of `FORMS`: 3 encoder blocks, 5 decoder blocks, and 2 beside 3.
ALPHAS = {"encoder": {"encoder": 6 ** (1 / 4)}, "decoder": {"decoder": 10 ** (1 / 4)}}
ALPHAS["encoder-decoder"] = {"encoder": 0.81 * (2**4 * 3) ** (1 / 16), "decoder": 9 ** (1 / 4)}


@pytest.mark.parametrize("form", FORMS)
def test_the_stack_equals_its_formula(form: str) -> None:
    def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
        for layer in layers:
            x = ln(ALPHAS[form][layer.site.side] * x + branch(layer, x, memory), layer.own.norm)
        return x

    compare(made("deepnorm", *FORMS[form]), stack)


def test_no_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="N=0, M=0"):
        Depth(0, 0)


def test_alpha_on_the_residual_and_the_norm_applied() -> None:
    # Alpha on the wrong branch flips the signs, alpha forgotten gives zeros, the norm forgotten gives [6, 7, 8, 9].
    norm = find_norm("layernorm")
    own = Own("ffn", {"norm": norm(4, 1e-5, norm.Options()), "alpha": 2.0})
    (y,) = SCHEME.write((torch.tensor([[1.0, 2, 3, 4]]),), torch.tensor([[4.0, 3, 2, 1]]), own)
    torch.testing.assert_close(y, torch.tensor([[-1.3416, -0.4472, 0.4472, 1.3416]]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_every_parameter_has_its_role_and_gain(activation: str) -> None:
    model = build(ModelConfig(M=100, d=16, heads=2, activation=activation, positions="learned", tied=False), 256, 0)
    beta = SINGLE[100][1]
    expected = {"q": 1.0, "k": 1.0, "v": beta, "o": beta, "in": beta, "gate": 1.0, "out": beta}
    ends = {"token": 1.0, "position": 1.0, "logits": 1.0}
    covered: dict[str, int] = {}
    for entry in weights(model):
        gain = SCHEME.gain(model.depth, entry.site, entry.role)
        assert gain == pytest.approx((expected | ends)[entry.role.part], abs=1e-5), entry
        covered[entry.name] = covered.get(entry.name, 0) + (entry.rows.stop - entry.rows.start)
    # Every parameter that is not a norm's is listed, with all of its rows.
    norms = {name for name, _ in model.named_parameters() if ".own." in name or name.startswith("ends.")}
    assert covered == {name: len(p) for name, p in model.named_parameters() if name not in norms}


@pytest.mark.parametrize("topology", ["decoder", "encoder-decoder"])
def test_drawn_weights_have_xavier_deviation_times_gain(topology: str) -> None:
    blocks = {"N": 0, "M": 100} if topology == "decoder" else {"N": 100, "M": 12}
    model = build(ModelConfig(**blocks, d=256, heads=4, context=8), 256, 0)
    beta = {"encoder": 0.87 * (100**4 * 12) ** (-1 / 16), "decoder": 144 ** (-1 / 4)}
    beta = {"decoder": SINGLE[100][1]} if topology == "decoder" else beta
    deviations: dict[tuple[str, str, str], list[float]] = {}
    for entry in weights(model):
        if not entry.role.bias and entry.site is not None:
            xavier = math.sqrt(2 / sum(entry.values.shape))
            key = (entry.site.side, entry.role.kind, entry.role.part)
            deviations.setdefault(key, []).append(float(entry.values.std()) / xavier)
    assert len(deviations) == (6 if topology == "decoder" else 6 + 10)
    for (side, kind, part), ratios in deviations.items():
        gain = 1.0 if part in ("q", "k") else beta[side]
        assert all(abs(r / gain - 1) < 0.02 for r in ratios), (side, kind, part)


def test_sites_are_global_and_counted() -> None:
    assert [len(Depth(*nm).sites()) for nm in ((5, 0), (0, 5), (5, 3))] == [10, 10, 2 * 5 + 3 * 3]
    assert Depth(1, 1).sites()[-1] == Site("decoder", 0, "ffn", 4)


def test_sublayers_of_a_block_are_in_the_order_they_run() -> None:
    assert [site.name for site in Depth(1, 2).sites()] == [
        "encoder.0000.self",
        "encoder.0000.ffn",
        "decoder.0000.self",
        "decoder.0000.cross",
        "decoder.0000.ffn",
        "decoder.0001.self",
        "decoder.0001.cross",
        "decoder.0001.ffn",
    ]
    assert (Depth(1, 0).kinds("encoder"), Depth(0, 1).kinds("decoder")) == (("self", "ffn"), ("self", "ffn"))
