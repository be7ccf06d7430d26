"""Every scheme trains: 20 steps at 24 blocks on the embedded text."""

import math

import pytest
import torch

from normscale.config.schema import RunConfig
from normscale.data.batches import Batches
from normscale.data.task import load_task
from normscale.models.builder import build
from normscale.schemes import find_scheme, scheme_names
from normscale.train.engines.plain import PlainEngine
from normscale.train.loop import Trainer
from tests.probes.test_probes import Notes


@pytest.mark.parametrize("scheme", scheme_names())
def test_it_trains_at_24_blocks(scheme: str) -> None:
    depth = {"M": 24} if "decoder" in find_scheme(scheme).topologies else {"N": 12, "M": 12}
    config = RunConfig(
        model={"d": 16, "heads": 2, "context": 16, "scheme": scheme} | depth,
        train={"steps": 20, "batch": 2, "optim": {"lr": 2e-3, "clip": 1.0}, "schedule": {"warmup_steps": 10}},
    )
    task = load_task(config)
    model, batches = build(config.model, task.vocab, 0), Batches(task.train, batch=2, seed=0)
    first = batches.window(0)[0]
    with torch.no_grad():
        model.scheme.calibrate(lambda: model(first.tokens_BT, **first.beside))
    trainer = Trainer(PlainEngine(model, config.precision, torch.device("cpu")), config, [])
    losses = [trainer.step(batches.window(step), Notes()).loss for step in range(20)]
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.1
