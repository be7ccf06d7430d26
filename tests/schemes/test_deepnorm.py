"""DeepNorm's constants and which parameters they reach."""

import math

import pytest
import torch

from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.models.init import weights
from normscale.norms import find_norm
from normscale.schemes import Depth, Own, Role, Site
from normscale.schemes.deepnorm import DeepNorm
from normscale.schemes.scheme import Part

SCHEME = DeepNorm()
SINGLE = {1: (1.18921, 0.59460), 6: (1.86121, 0.37992), 18: (2.44949, 0.28868), 100: (3.76060, 0.18803)} | {
    1000: (6.68740, 0.10574)
}
# N: alpha and beta of the encoder, of the decoder (N = M)
DOUBLE = {6: (1.418, 0.4970, 2.060, 0.3433), 100: (3.416, 0.2063, 4.162, 0.1699), 1000: (7.014, 0.1005, 7.401, 0.0955)}


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


def test_drawn_weights_have_xavier_deviation_times_gain() -> None:
    model = build(ModelConfig(M=100, d=256, heads=4, context=8), 256, 0)
    deviations: dict[str, list[float]] = {}
    for entry in weights(model):
        if not entry.role.bias and entry.role.kind in ("self", "ffn"):
            xavier = math.sqrt(2 / sum(entry.values.shape))
            deviations.setdefault(entry.role.part, []).append(float(entry.values.std()) / xavier)
    for part, ratios in deviations.items():
        gain = 1.0 if part in ("q", "k") else SINGLE[100][1]
        assert all(abs(r / gain - 1) < 0.02 for r in ratios), part


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
