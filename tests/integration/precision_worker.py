"""One of two ranks: trains a few steps in a given precision, and saves what both ranks must agree on.

It is started as `python -m tests.integration.precision_worker OUT ENGINE PRECISION`, the last as JSON, with torch's
variables for ranks in the environment.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from normscale.config.schema import RunConfig
from normscale.train.loop import Trainer
from normscale.train.run import run

OUT = Path(sys.argv[1])
CONFIG = RunConfig(
    model={"M": 2, "d": 16, "heads": 2, "context": 16},
    data={"max_bytes": 40_000},
    train={"steps": 5, "batch": 8, "accumulate": 2, "eval_batches": 1, "optim": {"name": "sgd", "lr": 0.5}},
    engine={"name": sys.argv[2]},
    precision=json.loads(sys.argv[3]),
    probes={"every": 1},
    tracking={"runs": str(OUT / "runs"), "uri": None},
)


def main() -> None:
    saved: dict[str, Any] = {"steps": [], "grads": []}
    original = Trainer.step

    def step(self, window, recorder):  # type: ignore[no-untyped-def]
        # In the third step the second rank alone has gradients beyond fp16.
        factor = 1e20 if self.attempted == 2 and self.engine.rank == 1 else 1.0
        hook = self.engine.inner.sublayers()[1].branch.register_forward_hook(
            lambda module, args, out: Grown.apply(out, factor) if out.requires_grad else None
        )
        result = original(self, window, recorder)
        hook.remove()
        saved["steps"].append((result.applied, result.overflow, result.scale))
        saved["grads"].append(self.engine.flat.grads.clone())
        with self.engine.whole() as tensors:
            saved["values"] = torch.cat([tensors[name].flatten() for name in sorted(tensors)])
        return result

    Trainer.step = step  # type: ignore[method-assign]
    run(CONFIG)
    torch.save(saved, OUT / f"rank{os.environ['RANK']}.pt")


class Grown(torch.autograd.Function):
    """The identity, with a gradient that is so many times larger."""

    @staticmethod
    def forward(ctx, x, factor):  # type: ignore[no-untyped-def]
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, dx):  # type: ignore[no-untyped-def]
        return dx * ctx.factor, None


main()
