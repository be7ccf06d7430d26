"""One of two ranks: `normscale train`, where the second rank alone has a fault in the third of four micro-batches.

It is started as `python -m tests.integration.provenance_worker OUT POLICY ENGINE`, with torch's variables for ranks in
the environment; the exit code of the command goes into a file.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from normscale.cli import main
from normscale.train.loop import Trainer

OUT, POLICY, ENGINE = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
WORDS = {
    "model.M": 2,
    "model.d": 16,
    "model.heads": 2,
    "model.context": 16,
    "model.dropout": 0.3,
    "data.max_bytes": 40_000,
    "train.steps": 8,
    "train.batch": 16,
    "train.accumulate": 4,
    "train.eval_batches": 1,
    "train.eval_every": 0,
    "engine.name": ENGINE,
    "probes.every": 1,
    "tracking.uri": "null",
    "tracking.runs": OUT / "runs",
}
POLICIES: dict[str, dict[str, Any]] = {
    "stop": {"train.on_nonfinite": "stop"},
    "three": {"train.on_nonfinite": "skip", "train.stop_after": 3},
}
STEP = 3  # from which on the fault is there


def run() -> int:
    original = Trainer.step

    def step(self, window, recorder):  # type: ignore[no-untyped-def]
        marked = window[2].tokens_BT if self.engine.rank == 1 and self.attempted + 1 >= STEP else None
        seen: list[torch.Tensor] = []
        inner = self.engine.inner
        branch = inner.sublayers()[3].branch
        hooks = [
            inner.register_forward_pre_hook(lambda module, args: seen.append(args[0])),
            branch.register_forward_hook(
                lambda module, args, out: (
                    out * torch.inf if marked is not None and torch.equal(seen[-1], marked) else None
                )
            ),
        ]
        result = original(self, window, recorder)
        for hook in hooks:
            hook.remove()
        return result

    Trainer.step = step  # type: ignore[method-assign]
    words = [f"{key}={value}" for key, value in (WORDS | POLICIES[POLICY]).items()]
    return main(["train", "configs/train/quick.yaml", *words])


(OUT / f"code{os.environ['RANK']}").write_text(str(run()))
