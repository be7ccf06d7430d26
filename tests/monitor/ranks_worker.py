"""One of two ranks: trains as DDP, FSDP2 or Accelerate, with a fault on the second rank alone.

It is started as `python -m tests.monitor.ranks_worker KIND OUT`, with torch's variables for ranks in the environment.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import normscale
from normscale.errors import NonFiniteStop
from normscale.monitor.drift import Drift
from tests.monitor.made import Poison, batches, loss_fn, marked, net

KIND, OUT = sys.argv[1], Path(sys.argv[2])
RANK = int(os.environ["RANK"])


def whole(p: Tensor) -> Tensor:
    return p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach().clone()


def fail_at(step: int) -> None:
    """Lets the probe of the model update fail before its pass."""
    original = Drift.after_step

    def after_step(self: Drift, at: int) -> None:
        if at == step:
            raise RuntimeError("on purpose")
        original(self, at)

    Drift.after_step = after_step  # type: ignore[method-assign]


def main() -> None:
    inner = net(3)
    accelerator: Any = None
    if KIND.startswith("accelerate"):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(RANK)
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model: nn.Module = inner
    if KIND == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in inner.blocks:
            fully_shard(block)
        fully_shard(inner)
    elif KIND == "ddp":
        model = nn.parallel.DistributedDataParallel(inner)
    optimizer: Any = torch.optim.SGD(inner.parameters(), 0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(inner, optimizer)
    Poison(inner, "blocks.1.proj")
    data = batches(20, seed=10 + RANK)
    more: dict[str, Any] = {"clip": 0.05, "update_batch": data[0]} if KIND == "fsdp2" else {}
    monitor = normscale.Monitor(model, loss_fn, runs=OUT / "runs", every=2, on_nonfinite=2, **more)
    if KIND == "fsdp2" and RANK == 1:
        fail_at(6)
    said: dict[str, Any] = {"run_id": monitor.run_id, "reports": [], "weights": [], "stopped": ""}
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    windows = [data[i : i + 2] for i in range(0, 20, 2)]
    try:
        for step, window in enumerate(windows, start=1):
            fault = RANK == 1 and step in (4, 7, 8)
            total = torch.zeros(())
            for index, batch in enumerate(window):
                batch = marked(batch) if fault and index == 1 else batch
                if accelerator is not None:
                    with accelerator.accumulate(model), monitor.micro_batch(batch):
                        loss = loss_fn(model, batch)
                        accelerator.backward(loss)
                        report = monitor.step(optimizer, loss)
                        optimizer.zero_grad()
                    continue
                monitor.micro_batch(batch)
                loss = loss_fn(model, batch) / 2
                if KIND == "ddp" and index == 0:
                    with model.no_sync():  # type: ignore[operator]
                        loss.backward()
                else:
                    loss.backward()
                total += loss.detach()
            if accelerator is None:
                report = monitor.step(optimizer, total)
                optimizer.zero_grad()
            if report.applied:
                scheduler.step()
            fields = report.culprit.fields() if report.culprit is not None else None
            said["reports"].append((report.step, report.applied, report.reason, report.grad_norm, fields))
            said["weights"].append([whole(p) for p in inner.parameters()])
    except NonFiniteStop as error:
        said["stopped"] = str(error)
    said["steps"], said["lr"] = monitor.steps, scheduler.get_last_lr()[0]
    monitor.close()
    torch.save(said, OUT / f"rank{RANK}.pt")
    dist.destroy_process_group()


main()
