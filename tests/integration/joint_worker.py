"""One of two ranks of an engine that gathers weights: trains six steps beside probes whose own passes fail.

It is started as `python -m tests.integration.joint_worker OUT ENGINE CASE`, with torch's variables for ranks in the
environment. CASE is "without", "local" (failures after which training goes on) or "broken" (one that ends the run).
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normscale.arguments import run_command
from normscale.config.schema import RunConfig
from normscale.probes import epsilon
from normscale.probes.layers import Layers
from normscale.probes.probe import Probe, Subject
from normscale.probes.update import ModelUpdate
from normscale.train import session
from normscale.train.loop import Trainer
from normscale.train.run import run
from tests.integration.engines_worker import section

OUT, ENGINE, CASE = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
SECOND = os.environ["RANK"] == "1"
CONFIG = RunConfig(
    model={"M": 3, "d": 16, "heads": 2, "context": 16},
    data={"max_bytes": 40_000},
    train={"steps": 6, "batch": 8, "eval_batches": 1},
    probes={"every": 4, "epsilon": {"every": 2}, "update": {"every": 3}, "layers": True},
    engine=section(ENGINE) | {"timeout_s": 600},
    tracking={"runs": str(OUT / "runs"), "uri": None},
)
TRAINERS: list[Trainer] = []


class Passing(Probe):
    """Makes one pass before the first step and one after step 2; `within` surrounds the second."""

    passes = True

    def __init__(self, name: str, inputs: Mapping[str, Tensor]) -> None:
        self.name, self.inputs = name, inputs  # type: ignore[misc]

    def attach(self, subject: Subject) -> None:
        if self.name == "attach" and SECOND:
            raise RuntimeError("before the pass")
        self.features = subject.features
        self.features(self.inputs)

    def due(self, step: int) -> bool:
        if self.name == "due" and SECOND and step == 2:
            raise RuntimeError("of one mind")
        return step == 2

    def after_step(self, step: int) -> None:
        if step == 2:
            with failing(self.name == "alike" or (self.name == "broken" and SECOND)):
                self.features(self.inputs)
            if self.name == "late" and SECOND:
                raise RuntimeError("after the pass")


@contextmanager
def failing(wanted: bool) -> Iterator[None]:
    """Makes the second block fail."""
    block = TRAINERS[0].engine.inner.blocks[1]

    def fail(module: object, args: object) -> None:
        if wanted:
            raise RuntimeError("amid the pass")

    hook = block.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def on_second(original: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """A function that fails on the second rank, after so many calls."""
    made = 0

    def fail(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        if SECOND and made > calls:
            raise RuntimeError("on purpose")
        return original(*arguments)

    return fail


def main() -> int:
    made = session._probes
    names = {"without": (), "local": ("attach", "due", "late", "alike"), "broken": ("broken",)}[CASE]

    def probes(config: RunConfig, task: Any) -> list[Probe]:
        found = made(config, task)
        (update,) = (probe for probe in found if isinstance(probe, ModelUpdate))
        return [*(Passing(name, update.inputs) for name in names), *found]

    session._probes = probes
    if CASE == "local":
        epsilon.sensitivity = on_second(epsilon.sensitivity, calls=3)
        Layers._loss = on_second(Layers._loss, calls=2)  # type: ignore[method-assign]
    original = Trainer.step

    def step(self: Trainer, *arguments: Any) -> Any:
        TRAINERS.append(self)
        return original(self, *arguments)

    Trainer.step = step  # type: ignore[method-assign]
    run(CONFIG)
    torch.save(TRAINERS[0].guard.off, OUT / os.environ["RANK"])
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
