"""One of two ranks under DDP whose gradients are not alike: rank 1 alone has NaN in one that DDP does not average.

It is started as `python -m tests.monitor.alike_worker OUT`, with torch's variables for ranks in the environment.
"""

import json
import math
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import normscale
from tests.monitor.made import Net, Spoilt, batches, loss_fn, net

OUT, RANK = Path(sys.argv[1]), int(os.environ["RANK"])

KINDS = ("beside", "scaled", "ignored", "group", "thawed", "thawed before", "frozen")
"""The parameter is none of the model, without and with a loss scale, one that DDP ignores, of a rank's own DDP, or was
frozen when DDP was made, and is no longer when training begins, or when the monitor is made; or still is."""


def wrapped(kind: str, inner: Net) -> DistributedDataParallel:
    if kind == "ignored":
        inner._ddp_params_and_buffers_to_ignore = ["head.bias"]  # type: ignore[assignment]
    if kind in ("thawed", "thawed before", "frozen"):
        inner.head.bias.requires_grad_(False)
    groups = [dist.new_group([rank]) for rank in range(2)] if kind == "group" else [None, None]
    return DistributedDataParallel(inner, process_group=groups[RANK])


def trained(kind: str, clip: float | None) -> list[Any]:
    inner = net(2)
    model = wrapped(kind, inner)
    apart = kind in ("beside", "scaled")
    beside = nn.Parameter(torch.ones(2)) if apart else inner.head.bias
    if kind == "thawed before":
        beside.requires_grad_(True)
    optimizer = torch.optim.SGD([*inner.parameters(), *([beside] if apart else [])], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=kind == "scaled")
    monitor = normscale.Monitor(model, runs=OUT / f"{kind}-{clip}", every=2, clip=clip)
    said = []
    for step, batch in enumerate(batches(4, seed=10 + RANK), start=1):
        if kind == "thawed":
            beside.requires_grad_(True)
        with monitor.micro_batch(batch):
            loss = loss_fn(model, batch)
            if kind != "frozen":
                own = beside.square().sum()
                loss = loss + (Spoilt.apply(own, math.nan, True) if RANK == 1 and step == 3 else own)
            scaler.scale(loss).backward()
        report = monitor.step(optimizer, loss, scaler=scaler)
        optimizer.zero_grad()
        said.append((report.applied, report.reason, report.grad_norm))
    said.append([scaler.get_scale(), float(inner.embed.weight.detach().double().sum()) if kind == "scaled" else None])
    said.append(monitor.engine.alike(monitor.engine._gradients_of(optimizer)))
    monitor.close()
    return said


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    said = {f"{kind}-{clip}": trained(kind, clip) for kind in KINDS for clip in (None, 1.0)}
    (OUT / f"rank{RANK}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


main()
