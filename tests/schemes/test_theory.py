"""Theory as numbers: how the stream, the gradients and the first update grow with depth, on real models at init.

As in the theorems, only weights of branches move, norms have no gain of their own and the loss is <G, output> for a
fixed random G of norm 1. Slopes are those of log against log of the number of blocks.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.models.stack import Transformer

DEPTHS, SEEDS = (4, 8, 16, 32), (0, 1)
ARMS: dict[str, dict[str, Any]] = {
    "post": {"scheme": "post"},
    "pre": {"scheme": "pre"},
    "peri": {"scheme": "peri"},
    "deepnorm": {"scheme": "deepnorm"},
    "alpha": {"scheme": "deepnorm", "scheme_options": {"use": "alpha"}},
    "beta": {"scheme": "deepnorm", "scheme_options": {"use": "beta"}},
    "subln": {"scheme": "subln"},
    "lns": {"scheme": "lns"},
    "keel": {"scheme": "keel"},
    "keel-1": {"scheme": "keel", "scheme_options": {"alpha": 1.0}},
    "mixln": {"scheme": "mixln"},
    "hybridnorm": {"scheme": "hybridnorm"},
    "spannorm": {"scheme": "spannorm"},
    "b2t": {"scheme": "b2t"},
    "b2t-rescaled": {"scheme": "b2t", "scheme_options": {"rescaled": True}},
}


def model_of(blocks: int, seed: int, **arm: Any) -> Transformer:
    free = {"activation": "relu", "bias": False, "norm_options": {"gain": False, "bias": False}}
    return build(ModelConfig(**{"M": blocks, "d": 64, "context": 8} | free | arm), 64, seed).double()


def measured(blocks: int, seed: int, **arm: Any) -> dict[str, float]:
    """The stream's variance at the end, gradient norms of the first and last feed-forward, and the output's change a
    unit of step size for one step of SGD and one of signs (mean norm over tokens)."""
    model, generator = model_of(blocks, seed, **arm), torch.Generator().manual_seed(100 + seed)
    tokens = torch.randint(0, 64, (4, 8), generator=generator)
    readout = torch.randn(4, 8, 64, generator=generator, dtype=torch.float64)
    outputs: list[torch.Tensor] = []
    y = model.features(tokens, outputs=outputs)
    parameters = dict(model.blocks.named_parameters())
    gradients = torch.autograd.grad((y * readout / readout.norm()).sum(), list(parameters.values()))
    norms = [
        float(g.norm()) for name, g in zip(parameters, gradients, strict=True) if name.endswith("branch.out.weight")
    ]
    result = {"variance": float(outputs[-1].var()), "first": norms[0], "last": norms[-1]}
    steps = {"sgd": (1e-6, gradients), "sign": (1e-9, [g.sign() for g in gradients])}  # small: the first order alone
    with torch.no_grad():
        for name, (size, step) in steps.items():
            for p, s in zip(parameters.values(), step, strict=True):
                p.sub_(size * s)
            result[name] = float((model.features(tokens) - y).norm(dim=-1).mean() / size)
            for p, s in zip(parameters.values(), step, strict=True):
                p.add_(size * s)
    return result


@cache
def slopes(arm: str) -> dict[str, float]:
    """Mean over seeds of every slope."""
    found = [[measured(blocks, seed, **ARMS[arm]) for blocks in DEPTHS] for seed in SEEDS]
    fits = [{k: np.polyfit(np.log(DEPTHS), np.log([r[k] for r in runs]), 1)[0] for k in runs[0]} for runs in found]
    return {k: float(np.mean([fit[k] for fit in fits])) for k in fits[0]}


def test_the_variance_of_a_pre_norm_stream_is_linear_in_depth_and_of_others_flat() -> None:
    for arm in ("pre", "peri"):
        assert 0.9 < slopes(arm)["variance"] < 1.2
    for arm in ("post", "deepnorm"):
        assert abs(slopes(arm)["variance"]) < 0.02


def test_gradients_at_init() -> None:
    # Xiong et al. 2020, Theorem 1: of the last feed-forward, depth-free under Post-Norm and L^(-1/2) under Pre-Norm.
    assert slopes("post")["last"] == pytest.approx(0.0, abs=0.1)
    assert slopes("pre")["last"] == pytest.approx(-0.5, abs=0.1)
    assert slopes("pre")["first"] == pytest.approx(0.0, abs=0.15)
    # DeepNorm: both ends alike.
    assert slopes("deepnorm")["first"] == pytest.approx(-0.5, abs=0.03)
    assert slopes("deepnorm")["last"] == pytest.approx(-0.5, abs=0.03)


def test_the_first_update_of_deepnorm_is_depth_free_under_sgd_and_grows_as_the_root_under_signs() -> None:
    # Wang et al. 2022, Theorem 4.2, is of SGD; where every weight moves alike it gives N^(1/2).
    assert slopes("deepnorm")["sgd"] == pytest.approx(0.0, abs=0.06)
    assert slopes("deepnorm")["sign"] == pytest.approx(0.5, abs=0.05)


def test_without_one_of_its_legs_the_update_grows_but_less_than_that_of_post_norm() -> None:
    post, alpha, beta = (slopes(arm) for arm in ("post", "alpha", "beta"))
    # Linear at least: one run differs much from another here, 1.5 to 2.4 over three pairs of seeds.
    assert 0.9 < post["sgd"] < 2.7
    assert 1.1 < post["sign"] < 2.1
    assert 0.6 < alpha["sgd"] < 1.4
    assert 0.9 < alpha["sign"] < 1.3
    assert beta["sgd"] == pytest.approx(0.5, abs=0.1)
    assert beta["sign"] == pytest.approx(0.75, abs=0.1)
    assert slopes("deepnorm")["sgd"] + 0.3 < beta["sgd"] < alpha["sgd"] < post["sgd"]


@pytest.mark.parametrize("side", ["N", "M"])
def test_the_pre_norm_stream_grows_within_the_bounds_of_lemma_2(side: str) -> None:
    """Xiong et al. 2020, Lemma 2: (1 + l/2) d <= E||x_l||^2 <= (1 + 3l/2) d, where q and k are 0 and F = D."""
    d, blocks = 128, 24
    norms = []
    for seed in range(3):
        model = model_of(blocks, seed, **{"N": 0, "M": 0} | {side: blocks}, d=d, ffn=d, scheme="pre")
        for sublayer in model.sublayers()[::2]:
            torch.nn.init.zeros_(sublayer.branch.qkv.weight[: 2 * d].detach())
        outputs: list[torch.Tensor] = []
        model.features(torch.randint(0, 64, (8, 8), generator=torch.Generator().manual_seed(seed)), outputs=outputs)
        norms.append(torch.stack([x.square().sum(-1).mean() / d for x in outputs]))
    mean, layers = torch.stack(norms).mean(0), torch.arange(blocks + 1)
    assert ((1 + layers / 2) * 0.97 <= mean).all()
    assert (mean <= (1 + 1.5 * layers) * 1.03).all()


def variances(scheme: str, blocks: int) -> list[float]:
    """Variance of a fresh stream where it enters and after every block, mean over seeds."""
    found = []
    for seed in SEEDS:
        outputs: list[torch.Tensor] = []
        model = model_of(blocks, seed, scheme=scheme)
        model.features(torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(seed)), outputs=outputs)
        found.append([float(x.var()) for x in outputs])
    return np.mean(found, axis=0).tolist()
