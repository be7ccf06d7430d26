"""Sums of squares by sublayer, against a loop over the parameters."""

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.probes.probe import Parameters, Span
from normscale.probes.segments import LEAST, LINE, SiteSquares
from normscale.train.engines.plain import PlainEngine
from normscale.train.observe import subject_of

MODELS = {
    "decoder": {"M": 5},
    "encoder": {"N": 4, "M": 0, "bias": False},
    "both": {"N": 2, "M": 3},
    "one": {"M": 1},
    "bare": {"M": 3, "bias": False, "norm_options": {"gain": False, "bias": False}},
    "gated": {"M": 3, "activation": "swiglu", "qk_norm": "head", "kv_latent": 6},
}


def engine_of(**options: object) -> PlainEngine:
    from normscale.config.precision import PrecisionConfig

    model = build(ModelConfig(**{"d": 16, "heads": 2, "context": 8, **options}), 32, 0)  # type: ignore[arg-type]
    return PlainEngine(model, PrecisionConfig(), torch.device("cpu"))


def loop(engine: PlainEngine, flat: Tensor) -> list[float]:
    spans = engine.flat.spans
    return [
        sum(float(flat[slice(*spans[name])].double().square().sum()) for name in names)
        for names in engine.inner.site_parameters()
    ]


@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_a_loop(name: str) -> None:
    engine = engine_of(**MODELS[name])
    parameters = subject_of(engine).parameters
    assert parameters is not None
    squares = SiteSquares(parameters)
    flat = engine.flat.values + torch.randn(engine.flat.values.shape) * (engine.flat.values != 0)
    torch.testing.assert_close(squares(flat).tolist(), loop(engine, flat), rtol=1e-5, atol=0)
    sampled = SiteSquares(parameters, most=10**5)  # a model so small is looked at as a whole
    torch.testing.assert_close(sampled(flat), squares(flat), rtol=1e-6, atol=0)


def test_a_uniform_stack_is_a_few_operations() -> None:
    parameters = subject_of(engine_of(M=40)).parameters
    assert parameters is not None
    assert len(SiteSquares(parameters).runs) == 4  # matrices and vectors of attention and of feed-forward


def laid_out(flat: Tensor, sites: list[tuple[list[Span], list[Span]]]) -> Parameters:
    return Parameters(lambda: flat, flat.device, sites, len(flat), [0] * len(sites), [])


@pytest.mark.parametrize("length", [1000, 1025, 5000, 65_536, 262_144])
@pytest.mark.parametrize("share", [1024, 4096])
def test_a_sample_is_spread_over_the_whole_and_estimates_the_sum(length: int, share: int) -> None:
    flat = torch.randn(3 * length, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.5, 2, 3 * length)
    spans = [([(i * length, (i + 1) * length)], []) for i in range(3)]
    squares = SiteSquares(laid_out(flat, spans), most=3 * share)
    (part,) = squares.parts(flat)
    assert part.numel() <= 3 * max(share, LEAST)
    assert part.numel() >= 3 * min(length, share) * 0.3
    exact = flat.view(3, length).double().square().sum(1)
    torch.testing.assert_close(squares(flat), exact, rtol=1e-6 if length <= share else 0.15, atol=0)
    places = squares.parts(torch.arange(3.0 * length).float())[0][0].flatten()
    assert places.diff().max() <= 2 * -(-length // share) * LINE + 2 * LINE  # no gap anywhere
    assert length - places.max() <= 2 * -(-length // share) * LINE + 2 * LINE


def test_all_columns_of_a_matrix_are_met() -> None:
    flat = torch.zeros(1024 * 256)
    squares = SiteSquares(laid_out(flat, [([(0, len(flat))], [])]), most=8192)
    columns = squares.parts(torch.arange(1024.0 * 256))[0].flatten() % 256
    assert len(columns.unique()) == 256
