"""One rank of a training step on an engine, under PyTorch's memory tracker from the beginning.

It is started as `python -m tests.plan.shards_worker OUT '{"engine.name": "fsdp2"}' ...`, one configuration after the
other, and rank 0 leaves the peaks of their second steps in OUT, in bytes.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.data.batches import Batches
from normscale.data.task import load_task
from normscale.models.builder import build
from normscale.train.engines.make import make_engine
from normscale.train.loop import Trainer
from tests.plan.test_memory import CPU, NoModules, Silent

BASE = RunConfig.model_validate(
    {"model": {"d": 64, "heads": 4, "context": 64, "M": 8}, "train": {"batch": 4, "steps": 50}}
)


def peak(config: RunConfig) -> int:
    """Returns the most bytes of this rank in its second step."""
    task = load_task(config)
    tracker = MemTracker()
    tracker._mod_tracker = NoModules()  # type: ignore[assignment]
    with tracker:
        engine = make_engine(build(config.model, task.vocab, 0), config)
        trainer = Trainer(engine, config, [])
        batches = Batches(
            task.train, batch=4, seed=0, accumulate=config.train.accumulate, rank=engine.rank, world=engine.world
        )
        trainer.step(batches.window(0), Silent())
        tracker._peak_mem, tracker._peak_mem_snap = {}, {}
        trainer.step(batches.window(1), Silent())
        return int(tracker.get_tracker_snapshot("peak")[CPU]["Total"])


if __name__ == "__main__":
    out, *configs = sys.argv[1:]
    torch.set_num_threads(1)
    peaks = [peak(revise(BASE, json.loads(changes))) for changes in configs]
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(peaks))
