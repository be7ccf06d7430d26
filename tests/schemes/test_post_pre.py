"""Post-, Pre- and DeepNorm against references written out here, and how their streams grow."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.models.attention import Context
from normscale.models.builder import build
from normscale.models.stack import Transformer
from normscale.ops.statistics import Buffers


def embedded(model: Transformer, tokens: Tensor) -> Tensor:
    assert model.position is not None
    return model.token[tokens] * model.d**0.5 + model.position[: tokens.shape[1]]


def norm(x: Tensor, own: torch.nn.Module) -> Tensor:
    parts = dict(own.named_parameters())
    return F.layer_norm(x, x.shape[-1:], parts["norm.gamma"], parts["norm.bias"], 1e-5)


@pytest.fixture(params=["post", "pre", "deepnorm"])
def model(request: pytest.FixtureRequest) -> Transformer:
    built = build(ModelConfig(M=5, d=32, heads=4, context=12, scheme=request.param, positions="learned"), 64, 3)
    with torch.no_grad():  # gains and biases that are not 1 and 0, so that leaving one out shows
        for p in built.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return built


def test_the_stack_equals_its_formula(model: Transformer) -> None:
    tokens = torch.randint(0, 64, (2, 12))
    x = embedded(model, tokens)
    for sublayer in model.sublayers():
        if model.scheme.name == "pre":
            x = x + sublayer.branch(norm(x, sublayer.own), Context())
        else:
            alpha = {"post": 1.0, "deepnorm": 10 ** (1 / 4)}[model.scheme.name]
            x = norm(alpha * x + sublayer.branch(x, Context()), sublayer.own)
    if model.scheme.name == "pre":
        x = norm(x, model.ends)
    torch.testing.assert_close(model.features(tokens), x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(tokens), x @ model.token.T, rtol=1e-4, atol=1e-4)


def stream_rms(scheme: str, blocks: int) -> Tensor:
    """RMS of the stream after every site of a fresh model."""
    model = build(ModelConfig(M=blocks, d=64, heads=4, context=32, scheme=scheme), 256, 0)
    rows = torch.zeros(len(model.sites()) * model.rows_per_site, 3)
    with torch.no_grad():
        model(torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0)), Buffers(rows))
    return (rows[1 :: model.rows_per_site, 0] / (4 * 32 * 64)).sqrt()


def test_the_pre_norm_stream_grows_with_depth_and_the_others_stay() -> None:
    pre = stream_rms("pre", 100)
    assert pre[1] < 0.5 * pre[19] < 0.25 * pre[199] * 2
    # Variance about linear in depth: each branch adds about the same.
    variance, sites = pre.square(), torch.arange(1, 201.0)
    slope = torch.linalg.lstsq(torch.stack([sites, torch.ones(200)], 1), variance.unsqueeze(1)).solution[0]
    linear = variance[0] + slope * (sites - 1)
    assert ((variance - linear).abs() / variance[-1]).max() < 0.15
    for scheme in ("post", "deepnorm"):
        assert ((stream_rms(scheme, 100) - 1).abs() < 0.1).all()
