"""One of two ranks: trains six steps beside probes that fail on the second rank alone.

It is started as `python -m tests.integration.probe_off_worker OUT METHOD...`, with torch's variables for ranks in the
environment; each METHOD is that of one more probe in which it fails.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from normscale.config.schema import RunConfig
from normscale.probes.probe import Array, Hand, Probe, Reading
from normscale.train import session
from normscale.train.loop import Trainer
from normscale.train.run import run

OUT, METHODS = Path(sys.argv[1]), sys.argv[2:]
CONFIG = RunConfig(
    model={"M": 2, "d": 16, "heads": 2, "context": 16},
    data={"max_bytes": 40_000},
    train={"steps": 6, "batch": 8, "eval_batches": 1},
    probes={"every": 2, "epsilon": {"every": 3}},
    tracking={"runs": str(OUT / "runs"), "uri": None},
)


class Failing(Probe):
    """Fails at step 4, on the second rank."""

    def __init__(self, method: str) -> None:
        self.name, self.step = method, 0  # type: ignore[misc]
        original = getattr(self, method)

        def fail(*arguments):  # type: ignore[no-untyped-def]
            if self.step == 4 and os.environ["RANK"] == "1":
                raise RuntimeError("on purpose")
            return original(*arguments)

        setattr(self, method, fail)

    def begin(self, step: int) -> None:
        self.step = step

    def hand_over(self) -> Mapping[str, Hand]:
        return {"a": Hand(torch.ones(3), "sum"), "b": Hand(torch.ones(2), "max")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        return Reading({"stream_max": float(values["a"][0])})


def main() -> None:
    made = session._probes
    session._probes = lambda *arguments: [*map(Failing, METHODS), *made(*arguments)]  # type: ignore[assignment]
    original = Trainer.step
    trainers: list[Trainer] = []

    def step(self, window, recorder):  # type: ignore[no-untyped-def]
        trainers.append(self)
        return original(self, window, recorder)

    Trainer.step = step  # type: ignore[method-assign]
    run(CONFIG)
    torch.save({"values": trainers[0].engine.flat.values, "off": trainers[0].guard.off}, OUT / os.environ["RANK"])


main()
