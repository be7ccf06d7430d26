"""Batch norm on several ranks: what each saw of a training with it, and of a bad value on one of them.

It is started as `python -m tests.integration.batchnorm_worker OUT ENGINE...`, as one rank of one or of two.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from normscale.data.batches import Batches
from normscale.data.task import load_task
from normscale.models.builder import build
from normscale.train.engines.make import check_engine, make_engine
from normscale.train.engines.plain import PlainEngine
from normscale.train.loop import Trainer
from tests.integration.engines_worker import MODEL, config_of, spoilt
from tests.probes.test_probes import Notes


def seen(engine_name: str, sync: bool) -> dict[str, Any]:
    """Trains four steps, of which in the third the last rank has a NaN in a branch."""
    model = MODEL | {"scheme": "pre", "norm": "batchnorm", "norm_options": {"sync": sync}, "checkpointing": True}
    config = config_of(engine_name, "adam", model=model)
    check_engine(config)
    task = load_task(config)
    engine = make_engine(build(config.model, task.vocab, 0), config)
    batches = Batches(task.train, batch=16, seed=0, rank=engine.rank, world=engine.world)
    trainer, notes = Trainer(engine, config, []), Notes()
    losses, running = [], []
    for step in range(4):
        window = batches.window(step)
        bad = window[0].tokens_BT if step == 2 and engine.rank == engine.world - 1 else None
        hooks = spoilt(engine, bad)
        losses.append(trainer.step(window, notes).loss)
        for hook in hooks:
            hook.remove()
        running.append({name: x.clone() for name, x in engine.state_dict()["model"].items() if "running" in name})
    held_out = trainer.evaluate(Batches(task.train, batch=16, seed=2).window(0))
    return {"losses": losses, "running": running, "held_out": held_out, "events": notes.events}


def main() -> None:
    torch.set_num_threads(1)
    out, *engines = sys.argv[1:]
    found = {(name, sync): seen(name, sync) for name in engines for sync in (True, False)}
    torch.save(found, Path(out) / f"rank{os.environ.get('RANK', '0')}.pt")
    PlainEngine.close(object.__new__(PlainEngine))


if __name__ == "__main__":
    main()
