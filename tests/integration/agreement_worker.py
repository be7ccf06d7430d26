"""The same training on one rank and on two: what each saw.

`python -m tests.integration.agreement_worker OUT` is one rank of two; the test itself is the one of one.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from normscale.config.schema import RunConfig
from normscale.data.batches import Batches
from normscale.data.task import load_task
from normscale.models.builder import build
from normscale.train.engines.make import make_engine
from normscale.train.loop import Trainer
from tests.probes.test_probes import Notes

MODEL = {"d": 32, "heads": 2, "context": 32, "positions": "learned"}
MODELS: dict[str, dict[str, Any]] = {
    "decoder": {"model": MODEL | {"M": 4}, "data": {"max_bytes": 60_000}},
    "encoder": {"model": MODEL | {"N": 4, "M": 0}, "data": {"max_bytes": 60_000}},
    "encoder-decoder": {"model": MODEL | {"N": 2, "M": 3, "context": 16}, "data": {"task": "copy"}},
}
OPTIMIZERS: dict[str, tuple[int, dict[str, Any]]] = {
    "sgd": (10, {"name": "sgd", "lr": 0.2}),
    "adam": (50, {"name": "adamw", "lr": 2e-3, "eps": 1e-6}),
}


def trajectory(model: str, optimizer: str) -> dict[str, Any]:
    """Trains on as many ranks as the environment says, and returns the first gradient and all losses."""
    steps, optim = OPTIMIZERS[optimizer]
    config = RunConfig(**MODELS[model], train={"steps": steps, "batch": 16, "optim": optim}, probes={"every": 1000})
    task = load_task(config)
    engine = make_engine(build(config.model, task.vocab, 0), config)
    trainer = Trainer(engine, config, [])
    batches = Batches(task.train, batch=16, seed=0, rank=engine.rank, world=engine.world)
    losses, first = [], torch.empty(0)
    for step in range(steps):
        losses.append(trainer.step(batches.window(step), Notes()).loss)
        first = engine.flat.grads.clone() if step == 0 else first
    return {"grads": first, "losses": torch.tensor(losses, dtype=torch.float64), "world": engine.world}


if __name__ == "__main__":
    seen = {(model, optimizer): trajectory(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS}
    torch.save(seen, Path(sys.argv[1]) / f"rank{os.environ['RANK']}.pt")
