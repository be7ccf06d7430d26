"""Models that train single numbers (of a branch, of a norm, of attention), on several engines: the losses of each.

It is started as `python -m tests.integration.numbers_worker OUT ENGINE...`, as one rank of one or of two; an engine is
as for `engines_worker`.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from normscale.data.batches import Batches
from normscale.data.task import load_task
from normscale.models.builder import build
from normscale.train.engines.make import make_engine
from normscale.train.engines.plain import PlainEngine
from normscale.train.loop import Trainer
from tests.integration.engines_worker import MODEL, config_of
from tests.probes.test_probes import Notes

MODELS: dict[str, dict[str, Any]] = {
    "rezero": {"scheme": "rezero", "qk_norm": "l2", "qk_scale_trained": True},
    "layerscale": {"scheme": "layerscale", "norms": {"attention": "scalenorm", "ffn": "dyt", "qk": "derf"}}
    | {"qk_norm": "head"},
}


def losses(engine_name: str, model: dict[str, Any]) -> list[float]:
    """Trains six steps."""
    config = config_of(engine_name, "adam", model=MODEL | model)
    task = load_task(config)
    engine = make_engine(build(config.model, task.vocab, 0), config)
    batches = Batches(task.train, batch=16, seed=0, accumulate=2, rank=engine.rank, world=engine.world)
    trainer = Trainer(engine, config, [])
    return [trainer.step(batches.window(step), Notes()).loss for step in range(6)]


def main() -> None:
    torch.set_num_threads(1)
    out, *engines = sys.argv[1:]
    seen = {(engine, model): losses(engine, MODELS[model]) for engine in engines for model in MODELS}
    torch.save(seen, Path(out) / f"rank{os.environ.get('RANK', '0')}.pt")
    PlainEngine.close(object.__new__(PlainEngine))


if __name__ == "__main__":
    main()
