"""With everything measured at every step, losses and weights are those of a run without a single probe, bit for bit."""

import math
from typing import Any

import pytest
import torch

from normscale.probes.adam import AdamEpsilon
from normscale.probes.epsilon import EpsilonSensitivity
from normscale.probes.layers import Layers
from normscale.probes.update import ModelUpdate
from normscale.schemes import scheme_names
from tests.probes.test_depth import every_probe
from tests.probes.test_probes import trained

STEPS = 50
TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"compute": "bf16"},
    "bf16-stream": {"compute": "bf16", "stream": "bf16"},
    "fp16": {"compute": "fp16", "loss_scale": {"initial": 64.0}},
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"model": {"checkpointing": True, "dropout": 0.1}},
    "accumulate": {"micro": 2, "optim": {"clip": 0.5}},
    "both": {"model": {"checkpointing": True}, "micro": 2},
}


def both(steps: int, **setting: Any) -> None:
    """Trains with nothing and with everything, and compares."""
    inputs, often = {"tokens_BT": TOKENS}, {"every": 5, "last": steps}
    extra = [ModelUpdate(inputs, (2, steps)), Layers([(inputs, TOKENS)], steps), AdamEpsilon(**often)]
    extra.append(EpsilonSensitivity(inputs, **often, compute=torch.float32))
    (plain, _), (probed, notes) = (trained(p, steps=steps, **setting) for p in ([], [*every_probe(), *extra]))
    assert torch.equal(plain.engine.flat.values, probed.engine.flat.values)
    assert list(plain.spikes.past) == list(probed.spikes.past)
    assert len(probed.spikes.past) == min(steps, probed.spikes.past.maxlen or steps)
    wanted = {"attn_entropy", "angle_online", "stream_grad_norm", "update_rel", "adam_eps_share"}
    assert wanted <= {name for _, name in notes.profiles}
    assert math.isfinite(notes.values[steps]["logz_max"])


@pytest.mark.parametrize(
    ("scheme", "precision", "way"),
    [
        ("pre", "fp32", "plain"),
        ("deepnorm", "fp32", "recompute"),
        ("pre", "fp32", "accumulate"),
        ("deepnorm", "fp32", "both"),
        ("pre", "bf16", "both"),
        ("deepnorm", "bf16", "plain"),
        ("deepnorm", "bf16-stream", "plain"),
        ("pre", "fp16", "plain"),
        ("deepnorm", "fp16", "both"),
    ],
)
def test_measuring_changes_no_bit(scheme: str, precision: str, way: str) -> None:
    setting = {"precision": PRECISIONS[precision], **WAYS[way]}
    setting["model"] = {"scheme": scheme, "M": 2, **setting.get("model", {})}
    both(STEPS, **setting)


@pytest.mark.parametrize("scheme", scheme_names())
def test_measuring_changes_no_scheme(scheme: str) -> None:
    both(5, model={"scheme": scheme, "M": 2})


def test_no_random_number_is_drawn() -> None:
    states = []
    for probes in ([], every_probe()):
        trained(probes, steps=3, model={"M": 1, "dropout": 0.2})
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scheme", ["pre", "deepnorm"])
@pytest.mark.parametrize("way", ["plain", "both"])
def test_measuring_changes_no_bit_of_what_is_compiled(scheme: str, way: str) -> None:
    torch._dynamo.reset()
    setting = dict(WAYS[way])
    setting["model"] = {"scheme": scheme, "M": 2, "compile": True, **setting.get("model", {})}
    both(STEPS, **setting)
