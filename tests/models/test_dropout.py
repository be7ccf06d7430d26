"""Dropout in each of its four places: alone it drops what it should in training, and nothing in evaluation."""

import pytest
import torch
from torch import Tensor, nn

from normscale.config.schema import ModelConfig
from normscale.models.attention import Context, SelfAttention
from normscale.models.builder import build
from normscale.models.feedforward import FeedForward

P = 0.25
MODEL = {"M": 1, "d": 64, "heads": 2, "context": 32, "scheme": "pre", "dropout": P}
TOKENS = torch.randint(0, 32, (4, 32), generator=torch.Generator().manual_seed(0))


class Ones(nn.Module):
    """A branch whose output is 1 everywhere."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return torch.ones_like(x)


def embedding(training: bool) -> Tensor:
    model = build(ModelConfig(**MODEL | {"scheme": "post"}), 32, 0).train(training)
    model.blocks = nn.ModuleList()  # Post-Norm has no final norm: what enters the stack is what leaves it
    return (model.features(TOKENS) / (model.token[TOKENS] * 8.0)).detach()


def branch(training: bool) -> Tensor:
    sublayer = build(ModelConfig(**MODEL), 32, 0).sublayers()[0]
    sublayer.branch = Ones()
    (stream,) = sublayer.train(training)((torch.zeros(4, 32, 64),), Context(), None)
    return stream


def feedforward(training: bool) -> Tensor:
    layer = FeedForward(64, 96, "gelu", False, P, {}).train(training)
    nn.init.ones_(layer.up.weight)
    layer.out = nn.Identity()
    x = torch.full((4, 32, 64), 1.0)
    return layer(x, Context()) / 64.0  # gelu(64) = 64


def attention(training: bool) -> Tensor:
    """Whether each first token, which attends to itself alone, passes its value on."""
    layer = SelfAttention(64, 16, True, P, {}, causal=True).train(training)
    nn.init.zeros_(layer.qkv.weight)
    nn.init.ones_(layer.qkv.bias)  # every value is 1
    layer.o = nn.Identity()
    return layer(torch.zeros(128, 2, 64), Context())[:, 0]


@pytest.mark.parametrize("place", [embedding, branch, feedforward, attention])
def test_a_share_is_dropped_in_training_and_nothing_in_evaluation(place) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    one, other = place(True), place(True)
    kept = torch.isclose(one, torch.tensor(1 / (1 - P)))
    assert ((one == 0) | kept).all()
    assert float((one == 0).float().mean()) == pytest.approx(P, abs=0.03)
    assert not torch.equal(one, other)  # a new mask every time
    torch.testing.assert_close(place(False), torch.ones_like(one))
