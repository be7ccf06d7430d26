"""Norms in int8: the rounding against its definition, and what it does to a model."""

import torch

from normscale.config.schema import ModelConfig
from normscale.fold.int8 import Int8Norms, int8
from normscale.models.builder import build

TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))


def test_rows_have_127_steps_to_either_side_and_a_size_of_their_own() -> None:
    x = torch.tensor([[127.0, -63.4, 0.6, 0.4], [0.0127, -0.00634, 0.00006, 0.00004], [0.0, 0.0, 0.0, 0.0]])
    wanted = torch.tensor([[127.0, -63.0, 1.0, 0.0], [0.0127, -0.0063, 0.0001, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert torch.allclose(int8(x), wanted, rtol=1e-6, atol=1e-9)
    assert not int8(torch.tensor([float("nan"), 1.0])).isfinite().all()


@torch.no_grad()
def test_errors_are_of_each_norm_by_itself_and_the_pass_goes_on_undisturbed() -> None:
    model = build(ModelConfig(M=2, d=16, heads=2, context=8, scheme="pre"), 32, 0).eval()
    clean = model(TOKENS)
    norms = Int8Norms(model)
    seen: dict[str, torch.Tensor] = {}
    first = "blocks.0.sublayers.self.own.norm"
    hook = norms.norms[first].register_forward_hook(lambda module, inputs, output: seen.update(y=output))
    with norms.watched():
        assert torch.equal(model(TOKENS), clean)
    hook.remove()
    y = seen["y"]  # gains are 1 here: int8 has them exactly
    wanted = float((int8(y) - y).double().square().sum().sqrt() / y.double().square().sum().sqrt())
    assert abs(norms.errors()[first] - wanted) < 1e-9
    assert all(0.001 < error < 0.02 for error in norms.errors().values())
    with norms.on():
        assert 1e-4 < float((model(TOKENS) - clean).abs().max()) < 0.5
    assert torch.equal(model(TOKENS), clean)


@torch.no_grad()
def test_the_gain_is_rounded_too_zero_centred_or_not() -> None:
    for zero_centred in (False, True):
        options = {"zero_centred": zero_centred}
        config = ModelConfig(M=1, d=16, heads=2, context=8, scheme="pre", norm="rmsnorm", norm_options=options)
        model = build(config, 32, 0).eval()
        gain = torch.linspace(0.3, 2.0, 16)
        norm = model.get_submodule("blocks.0.sublayers.self.own.norm")
        norm.gamma.copy_(gain - 1 if zero_centred else gain)
        norms = Int8Norms(model)
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
        with norms.on():
            y = norm(x)
        plain = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        assert torch.allclose(y, int8(plain * int8(gain)), atol=1e-6)
        assert not torch.allclose(y, int8(plain * gain), atol=1e-3)
