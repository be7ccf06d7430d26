import pytest
import torch
from torch import nn

from normscale.config.schema import OptimConfig
from normscale.train.flat import FlatParameters
from normscale.train.optim import build_optimizer


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 7, bias=False))


def test_values_and_gradients_are_views_and_the_module_is_unchanged() -> None:
    net, twin, x = model(), model(), torch.randn(4, 5)
    flat = FlatParameters(net)
    for _ in range(2):  # twice: the second backward adds into the buffer
        net(x).square().sum().backward()
        twin(x).square().sum().backward()
        flat.check()
    for name, p in net.named_parameters():
        start, stop = flat.spans[name]
        assert start % 16 == 0
        assert torch.equal(flat.values[start:stop], p.detach().flatten())
        assert torch.equal(flat.grads[start:stop], p.grad.flatten())  # type: ignore[union-attr]
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    assert list(flat.spans)[:2] == ["0.weight", "2.weight"]
    assert flat.split == flat.spans["0.bias"][0]


def test_a_replaced_gradient_is_noticed() -> None:
    net = model()
    flat = FlatParameters(net)
    net.zero_grad(set_to_none=True)
    net(torch.randn(4, 5)).sum().backward()
    with pytest.raises(AssertionError, match=r"0\.weight"):
        flat.check()


@pytest.mark.parametrize(
    "config",
    [
        OptimConfig(lr=0.01, weight_decay=0.1),
        OptimConfig(lr=0.01, weight_decay=0.1, betas=(0.5, 0.6), eps=0.1),
        OptimConfig(name="sgd", lr=0.01, momentum=0.9, weight_decay=0.1),
    ],
    ids=["adamw", "adamw-betas-eps", "sgd"],
)
def test_the_flat_optimizer_equals_one_over_the_parameters(config: OptimConfig) -> None:
    net, twin, x = model(), model(), torch.randn(4, 5)
    flat = FlatParameters(net)
    ours = build_optimizer(flat, config)
    groups = [
        {"params": [p for p in twin.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in twin.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    plain = (
        torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        if config.name == "sgd"
        else torch.optim.AdamW(groups, lr=0.01, betas=config.betas, eps=config.eps)
    )
    for _ in range(5):
        flat.zero_grad()
        plain.zero_grad()
        for m in (net, twin):
            m(x).square().sum().backward()
        ours.step()
        plain.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_faults_name_the_parameter_and_the_kind() -> None:
    net = model()
    flat = FlatParameters(net)
    assert flat.faults() == []
    net[1].weight.grad[1] = float("-inf")
    net[2].weight.grad[0, :2] = torch.tensor([float("inf"), float("nan")])
    named = {fault.parameter: fault for fault in flat.faults()}
    assert set(named) == {"1.weight", "2.weight"}
    assert named["1.weight"].kind == "-Inf"
    assert (named["2.weight"].nan, named["2.weight"].pos_inf, named["2.weight"].kind) == (1, 1, "NaN")
