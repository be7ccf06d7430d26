"""One of two ranks: trains a run to its end, then in another folder up to step 7, and goes on with that.

Between, the second rank's file of the checkpoint after step 6 is spoilt, so that the first rank alone could use it. The
processes stay for all three, and so does their group.

It is started as `python -m tests.integration.resume_worker OUT ENGINE`, with variables for ranks in the environment.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from normscale.config.schema import RunConfig
from normscale.train.engines.engine import Engine
from normscale.train.run import run
from tests.integration.engines_worker import section

OUT, ENGINE = Path(sys.argv[1]), sys.argv[2]


def config(name: str) -> RunConfig:
    return RunConfig(
        model={"M": 2, "d": 16, "heads": 2, "context": 16, "dropout": 0.3},
        data={"max_bytes": 40_000},
        train={"steps": 8, "batch": 8, "eval_batches": 1},
        engine=section(ENGINE),
        probes={"every": 1, "update": {"every": 4}},
        checkpoint={"every": 2},
        tracking={"runs": str(OUT / name), "uri": None},
    )


def stop(step: int, steps: int, loss: float) -> None:
    if step == 7:
        raise KeyboardInterrupt


def main() -> None:
    Engine.close = lambda self: None  # type: ignore[method-assign]
    run(config("whole"))
    with suppress(KeyboardInterrupt):
        run(config("parted"), on_step=stop)
    dist.barrier()
    if os.environ["RANK"] == "1":
        (file,) = (OUT / "parted").glob("*/checkpoints/step-00000006/rank1.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()
    run(config("parted"))
    dist.destroy_process_group()


main()
