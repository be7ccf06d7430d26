"""One of two ranks under FSDP2 with re-entrant checkpointing, which allows no replay; rank 0 has NaN at step 3.

It is started as `python -m tests.monitor.reentrant_worker OUT`, with torch's variables for ranks in the environment.
"""

import json
import math
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import normscale
from tests.monitor.made import Spoilt, batches, loss_fn

OUT, RANK = Path(sys.argv[1]), int(os.environ["RANK"])


class Block(nn.Module):
    """Recomputes a part of itself, so that its own output has a gradient to watch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, self.norm(x), use_reentrant=True)  # type: ignore[no-any-return]


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 2))
    for block in (model[1], model[2]):
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        loss = loss_fn(model, batch)
        return Spoilt.apply(loss, math.nan, True) if batch[0, 0] == 9 else loss  # type: ignore[no-any-return]

    monitor = normscale.Monitor(model, loss_of, runs=OUT / "runs", every=1)
    said = []
    for step, batch in enumerate(batches(6, seed=10 + RANK), start=1):
        if RANK == 0 and step in (3, 5):
            batch[0, 0] = math.nan if step == 3 else 9  # at step 5 the loss is finite, so that a replay would go back
        with monitor.micro_batch(batch):
            loss = loss_of(model, batch)
            loss.backward()
        report = monitor.step(optimizer, loss)
        optimizer.zero_grad()
        said.append((report.applied, None if report.culprit is None else report.culprit.fields()))
    monitor.close()
    (OUT / f"rank{RANK}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


main()
