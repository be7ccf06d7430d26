"""One of two ranks: trains two steps with dropout and accumulation, and saves what no record tells.

In a third step the second rank alone has a fault, in the feed-forward of the second block.

It is started as `python -m tests.integration.worker OUT`, with torch's variables for ranks in the environment.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from normscale.config.schema import RunConfig
from normscale.train.loop import Trainer
from normscale.train.run import run

OUT = Path(sys.argv[1])
CONFIG = RunConfig(
    model={"M": 2, "d": 16, "heads": 2, "context": 16, "dropout": 0.5},
    data={"max_bytes": 40_000},
    train={"steps": 3, "batch": 8, "accumulate": 2, "eval_batches": 1, "on_nonfinite": "skip"},
    probes={"every": 1},
    tracking={"runs": str(OUT / "runs"), "uri": None},
)


def main() -> None:
    saved: dict[str, Any] = {"reductions": [], "masks": [], "batches": []}
    original = Trainer.step

    def count(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Averages as without a hook, and counts."""
        if bucket.is_last():
            saved["reductions"][-1] += 1
        averaged = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return averaged.get_future().then(lambda done: done.value()[0])

    def step(self, window, recorder):  # type: ignore[no-untyped-def]
        if self.attempted == 0:
            self.engine.model.register_comm_hook(None, count)
            self.engine.inner.dropout.register_forward_hook(
                lambda module, args, out: saved["masks"].append(out == 0) if module.training else None
            )
        saved["reductions"].append(0)
        saved["batches"] += [batch.tokens_BT for batch in window]
        if self.attempted == 2 and self.engine.rank == 1:
            branch = self.engine.inner.sublayers()[3].branch
            branch.register_forward_hook(lambda module, args, out: out * torch.inf)
        result = original(self, window, recorder)
        saved["again"], saved["masks"] = saved["masks"][2 * self.attempted :], saved["masks"][: 2 * self.attempted]
        if result.applied:
            saved["grads"] = self.engine.flat.grads.clone()
        saved["values"] = self.engine.flat.values.clone()
        return result

    Trainer.step = step  # type: ignore[method-assign]
    run(CONFIG)
    torch.save(saved, OUT / f"rank{os.environ['RANK']}.pt")


main()
