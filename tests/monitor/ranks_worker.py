"""One of two ranks: trains in several ways, one after the other, with a fault on the second rank alone.

It is started as `python -m tests.monitor.ranks_worker OUT`, with torch's variables for ranks in the environment.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import normscale
from normscale.errors import NonFiniteStop, StoreError
from normscale.monitor import rows
from normscale.monitor.drift import Drift
from normscale.tracking import sink_process
from normscale.tracking.spool import SpoolWriter
from tests.monitor.made import Net, Poison, batches, loss_fn, marked, net

OUT = Path(sys.argv[1])
RANK = int(os.environ["RANK"])

KINDS = ("ddp", "ddp-late", "meeting", "fsdp2", "fsdp2-late", "warm-up", "accelerate", "accelerate-fsdp2")
"""In the late ones the model is wrapped, or sharded, when it is monitored already; in one ranks meet in the model."""


def whole(p: Tensor) -> Tensor:
    return p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach().clone()


class Averaged(torch.autograd.Function):
    """The mean over ranks, of gradients too, as norms in step over ranks take it within the model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y / 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return Averaged.forward(ctx, gradients[0])


@contextmanager
def failing_at(step: int) -> Iterator[None]:
    """Lets the probe of the model update fail before its pass."""
    original = Drift.after_step

    def after_step(self: Drift, at: int) -> None:
        if at == step:
            raise RuntimeError("on purpose")
        original(self, at)

    Drift.after_step = after_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Drift.after_step = original  # type: ignore[method-assign]


@contextmanager
def failing_rows(fails: bool) -> Iterator[list[int]]:
    """Lets the rows of blocks fail whenever they look at one; gives how often they have."""
    original, looked = rows.block_statistics, list[int]()

    def block_statistics(x: Tensor) -> Tensor:
        looked.append(1)
        raise RuntimeError("on purpose")

    rows.block_statistics = block_statistics if fails else original
    try:
        yield looked
    finally:
        rows.block_statistics = original


def wrapped(kind: str, inner: Net) -> nn.Module:
    if not kind.startswith("fsdp2"):
        return nn.parallel.DistributedDataParallel(inner)
    from torch.distributed.fsdp import fully_shard

    for block in inner.blocks:
        fully_shard(block)
    fully_shard(inner)
    return inner


def accelerator_of(kind: str) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    plugin = None
    if kind.endswith("fsdp2"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=False,
        )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
    if plugin is not None:  # which Accelerate itself leaves out on a CPU
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator


def trained(kind: str) -> dict[str, Any]:
    """Returns what this rank has to say of one way to train."""
    inner = net(3)
    more: dict[str, Any] = {"every": 2, "on_nonfinite": 2}
    faults, size = (4, 7, 8), 2
    if kind.startswith("fsdp2"):
        more |= {"clip": 0.05, "update_batch": batches(1, seed=10 + RANK)[0]}
    if kind == "warm-up":
        faults, size = (4,), 4
    model: nn.Module = inner
    monitor = None
    if kind == "meeting":
        inner.blocks[0].register_forward_hook(lambda module, args, output: Averaged.apply(output))
    Poison(inner, "blocks.1.proj")
    if kind.endswith("late"):
        monitor = normscale.Monitor(inner, loss_fn, runs=OUT / kind, **more)
    accelerator = accelerator_of(kind) if kind.startswith("accelerate") else None
    if accelerator is None:
        model = wrapped(kind, inner)
    optimizer: Any = torch.optim.SGD(inner.parameters(), 0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(inner, optimizer)
        torch.manual_seed(RANK)
    monitor = monitor or normscale.Monitor(model, loss_fn, runs=OUT / kind, **more)
    said: dict[str, Any] = {"run_id": monitor.run_id, "reports": [], "weights": [], "stopped": ""}
    due = (lambda step: min(1.0, (1 + step) / 10)) if kind == "warm-up" else (lambda step: 1 / (1 + step))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, due)
    data = batches(9 * size if kind == "warm-up" else 10 * size, seed=10 + RANK)
    windows = [data[i : i + size] for i in range(0, len(data), size)]
    try:
        for step, window in enumerate(windows, start=1):
            total = torch.zeros(())
            for index, batch in enumerate(window):
                batch = marked(batch) if RANK == 1 and step in faults and index == 1 else batch
                if accelerator is not None:
                    with accelerator.accumulate(model), monitor.micro_batch(batch):
                        loss = loss_fn(model, batch)
                        accelerator.backward(loss)
                        report = monitor.step(optimizer, loss, scheduler=scheduler)
                        optimizer.zero_grad()
                    continue
                monitor.micro_batch(batch)
                loss = loss_fn(model, batch) / size
                if model is not inner and index < size - 1:
                    with model.no_sync():  # type: ignore[operator]
                        loss.backward()
                else:
                    loss.backward()
                total += loss.detach()
            if accelerator is None:
                report = monitor.step(optimizer, total, scheduler=scheduler)
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
    return said


def refused() -> list[str]:
    """Returns why no monitor could be made where the first rank cannot write a start record, or its sink's log."""
    said = []
    full = "tracking.runs: cannot write x (No space left); choose another folder: tracking.runs=<folder>"
    for owner, name, error in (
        (SpoolWriter, "start", StoreError(full)),
        (sink_process, "Sink", StoreError(full)),
        (SpoolWriter, "start", ZeroDivisionError("on purpose")),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if RANK == 0:
                patch.setattr(owner, name, Mock(side_effect=error))
            try:
                normscale.Monitor(net(3), loss_fn, runs=OUT / "refused", uri=f"sqlite:///{OUT}/mlflow.db")
            except (StoreError, ZeroDivisionError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    said: dict[str, Any] = {"refused": refused()}
    for kind in KINDS:
        with (
            failing_at(6 if kind.startswith("fsdp2") and RANK == 1 else 0),
            failing_rows(kind == "warm-up" and RANK == 1) as looked,
        ):
            said[kind] = trained(kind) | {"looked": len(looked)}
    torch.save(said, OUT / f"rank{RANK}.pt")
    dist.destroy_process_group()


main()
