"""Every scheme, trained on several engines one after the other in one process group: what each came to.

It is started as `python -m tests.integration.schemes_worker OUT ENGINE...`, as one rank of one or of two; an engine is
named as in `engines_worker`.
"""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from normscale.data.batches import Batches
from normscale.data.task import Task, load_task
from normscale.models.builder import build
from normscale.schemes import scheme_names
from normscale.train.engines.make import make_engine
from normscale.train.engines.plain import PlainEngine
from normscale.train.loop import Trainer
from tests.integration.engines_worker import MODEL, config_of
from tests.probes.test_probes import Notes

STEPS = 2
SCHEMES: dict[str, dict[str, Any]] = {name: {"scheme": name} for name in scheme_names()} | {
    "admin-torch-trained": {"scheme": "admin-torch", "scheme_options": {"trained": True}},
    "hyper": {"scheme": "hyper", "scheme_options": {"streams": 3}},
    "mhc": {"scheme": "hyper", "scheme_options": {"form": "mhc", "streams": 3, "iterations": 5}},
    "ngpt": {"scheme": "ngpt", "activation": "swiglu", "tied": False, "segments": 0},
    "rezero": {"scheme": "rezero", "scheme_options": {"start": 0.5}},  # whose branches reach nothing at first
}


@cache
def task() -> Task:
    return load_task(config_of("plain", "adam"))


def trained(engine_name: str, scheme: str) -> dict[str, Any]:
    config = config_of(engine_name, "adam", model=MODEL | SCHEMES[scheme])
    model = build(config.model, task().vocab, 0)
    first = Batches(task().train, batch=16, seed=0).window(0)[0]
    with torch.no_grad():
        model.scheme.calibrate(lambda: model(first.tokens_BT, **first.beside))
    engine = make_engine(model, config)
    batches = Batches(task().train, batch=16, seed=0, accumulate=2, rank=engine.rank, world=engine.world)
    trainer = Trainer(engine, config, [])
    results = [trainer.step(batches.window(step), Notes()) for step in range(STEPS)]
    with engine.whole() as tensors:
        values = {name: tensor.clone() for name, tensor in tensors.items()}
    return {"losses": [result.loss for result in results], "values": values, "digest": engine.digest()}


def main() -> None:
    torch.set_num_threads(1)
    out, *engines = sys.argv[1:]
    seen = {(name, scheme): trained(name, scheme) for name in engines for scheme in SCHEMES}
    torch.save(seen, Path(out) / f"rank{os.environ.get('RANK', '0')}.pt")
    PlainEngine.close(object.__new__(PlainEngine))


if __name__ == "__main__":
    main()
