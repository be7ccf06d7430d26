"""One training step with everything measured, on one rank or on two: what each says of it.

`python -m tests.integration.depth_worker OUT` is one rank of two; the test itself is the one of one.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from normscale.config.schema import RunConfig
from normscale.data.batches import Batches
from normscale.data.task import load_task
from normscale.models.builder import build
from normscale.train.engines.make import make_engine
from normscale.train.loop import Trainer
from normscale.train.observe import subject_of
from tests.probes.test_depth import every_probe
from tests.probes.test_probes import Notes

CONFIG = RunConfig(
    model={"M": 3, "d": 32, "heads": 2, "context": 16, "positions": "learned"},
    data={"max_bytes": 40_000},
    train={"steps": 2, "batch": 8, "accumulate": 2},
    probes={"every": 1},
)


def step() -> dict[str, Any]:
    """Makes one step and returns its scalars and profiles, and the number of collectives on the way."""
    task = load_task(CONFIG)
    engine = make_engine(build(CONFIG.model, task.vocab, 0), CONFIG)
    probes = every_probe()
    for probe in probes:
        probe.attach(subject_of(engine))
    batches = Batches(task.train, batch=8, seed=0, accumulate=2, rank=engine.rank, world=engine.world)
    trainer, notes = Trainer(engine, CONFIG, probes), Notes()
    trainer.step(batches.window(0), Notes())
    calls: list[str] = []
    real = dist.all_reduce
    dist.all_reduce = lambda *a, **k: calls.append("all_reduce") or real(*a, **k)
    trainer.step(batches.window(1), notes)
    dist.all_reduce = real
    profiles = {name: torch.tensor(profile) for (_, name), profile in notes.profiles.items()}
    return {"scalars": dict(notes.values[2]), "profiles": profiles, "world": engine.world, "collectives": len(calls)}


if __name__ == "__main__":
    torch.save(step(), Path(sys.argv[1]) / f"rank{os.environ['RANK']}.pt")
