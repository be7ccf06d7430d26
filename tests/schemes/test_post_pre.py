"""Post-, Pre- and DeepNorm against references written out here, and how their streams grow."""

from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.ops.statistics import Buffers
from normscale.schemes import find_scheme
from tests.schemes.written import FORMS, TOKENS, assert_unit_gains, branch, compare, ln, made, norm, owned

# DeepNorm's alpha of 3 encoder blocks, of 5 decoder blocks, and of 2 beside 3.
ALPHAS = {
    "encoder": {"encoder": 6 ** (1 / 4)},
    "decoder": {"decoder": 10 ** (1 / 4)},
    "encoder-decoder": {"encoder": 0.81 * (2**4 * 3) ** (1 / 16), "decoder": 9 ** (1 / 4)},
}


def stack_of(scheme: str, form: str, final_norm: bool = True) -> Any:
    def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
        for layer in layers:
            if scheme == "pre":
                x = x + branch(layer, ln(x, layer.own.norm), memory)
            else:
                alpha = ALPHAS[form][layer.site.side] if scheme == "deepnorm" else 1.0
                x = ln(alpha * x + branch(layer, x, memory), layer.own.norm)
        return ln(x, ends.norm) if scheme == "pre" and final_norm else x

    return stack


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scheme", ["post", "pre", "deepnorm"])
def test_the_stack_equals_its_formula(scheme: str, form: str) -> None:
    compare(made(scheme, *FORMS[form]), stack_of(scheme, form))


def test_logits_are_products_with_the_token_vectors() -> None:
    model = made("pre", 0, 3)
    torch.testing.assert_close(model(TOKENS), model.features(TOKENS) @ model.token.T)


@pytest.mark.parametrize("form", FORMS)
def test_without_its_final_norm_the_stream_leaves_as_it_is(form: str) -> None:
    compare(made("pre", *FORMS[form], final_norm=False), stack_of("pre", form, final_norm=False))


@pytest.mark.parametrize(
    ("scheme", "site", "ends"),
    [
        ("post", ("norm",), {}),
        ("deepnorm", ("norm",), {}),
        ("pre", ("norm",), norm("norm")),
        ("peri", ("norm", "out_norm"), norm("norm")),
        ("reordered", ("norm",), norm("norm")),
    ],
)
def test_what_they_own(scheme: str, site: tuple[str, ...], ends: dict[str, tuple[int, ...]]) -> None:
    if scheme != "deepnorm":
        assert_unit_gains(find_scheme(scheme)())
    both = "encoder-decoder" in find_scheme(scheme).topologies
    found = owned(made(scheme, 2 if both else 0, 2))
    assert found.pop("ends") == ends
    assert not both or found.pop("source ends") == ends
    each = {name: shape for one in site for name, shape in norm(f"own.{one}").items()}
    assert found == dict.fromkeys(found, each)


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
