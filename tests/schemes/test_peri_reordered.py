"""Peri- and reordered norm against formulas written out here, in every topology that they have."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.attention import Context
from normscale.models.builder import build
from normscale.models.plan import resolve

TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
SOURCE = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(1))


def norm(x: Tensor, layer: Any) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], None, 1e-5) * (1 + layer.gamma)


def stack(scheme: str, x: Tensor, sublayers: list[Any], ends: Any, context: Context) -> Tensor:
    for sublayer in sublayers:
        own = sublayer.own
        if scheme == "peri":
            x = x + norm(sublayer.branch(norm(x, own.norm), context), own.out_norm)
        else:
            x = x + norm(sublayer.branch(x, context), own.norm)
    return norm(x, ends.norm)


@pytest.mark.parametrize(
    ("scheme", "N", "M"), [("peri", 3, 0), ("peri", 0, 3), ("peri", 2, 3), ("reordered", 3, 0), ("reordered", 0, 3)]
)
def test_the_stack_equals_its_formula(scheme: str, N: int, M: int) -> None:
    size = {"d": 16, "heads": 2, "context": 8, "positions": "sinusoidal"}
    config = ModelConfig(**size, N=N, M=M, scheme=scheme, norm="rmsnorm", norm_options={"zero_centred": True})
    model: Any = build(config, 32, 0).double()
    with torch.no_grad():  # gains that are not 1, so that leaving one out shows
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    embedded = {n: model.token[t] * 4.0 + model.sinusoids[: t.shape[1]] for n, t in (("x", TOKENS), ("s", SOURCE))}
    sublayers = model.sublayers()
    if N and M:
        memory = stack(scheme, embedded["s"], sublayers[: 2 * N], model.source_ends, Context())
        want = stack(scheme, embedded["x"], sublayers[2 * N :], model.ends, Context(None, memory))
        torch.testing.assert_close(model.features(TOKENS, source_BS=SOURCE), want)
    else:
        torch.testing.assert_close(
            model.features(TOKENS), stack(scheme, embedded["x"], sublayers, model.ends, Context())
        )


def test_a_reordered_norm_in_an_encoder_beside_a_decoder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.scheme: 'reordered' has no encoder-decoder form"):
        resolve(ModelConfig(N=2, M=2, scheme="reordered"))
