"""Small models and loops that people might have."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normscale
from normscale.tracking.reader import RunRecord, read_run

WIDTH = 8


class Block(nn.Module):
    """A Pre-Norm block, whose branch can be made to go wrong."""

    def __init__(self, width: int = WIDTH, shape: str = "tensor") -> None:
        super().__init__()
        self.norm, self.proj, self.drop = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.1)
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        y = x + self.drop(torch.tanh(self.proj(self.norm(x))))
        return {"tensor": y, "dict": {"aux": 0, "h": y}, "tuple": (y, None), "nested": ((y,), "cache")}[self.shape]


class Net(nn.Module):
    """Embeds, runs the blocks, and puts a head on top."""

    def __init__(self, depth: int = 3, width: int = WIDTH, shape: str = "tensor", inplace: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width, shape) for _ in range(depth))
        self.head = nn.Linear(width, 2)
        self.inplace, self.checkpointed = inplace, ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant")
            else:
                x = block(x)
            while not isinstance(x, Tensor):
                x = x["h"] if isinstance(x, dict) else x[0]
            if self.inplace:
                x += 1
        return self.head(x)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def net(depth: int = 3, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(depth, **options)


def batches(count: int, rows: int = 5, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 4, generator=generator) for _ in range(count)]


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def train(
    model: nn.Module, monitor: "normscale.Monitor", data: list[Tensor], accumulate: int = 1, optimizer: Any = None
) -> list["normscale.StepReport"]:
    """Trains as a loop would, one step for every `accumulate` batches; returns the reports."""
    optimizer = optimizer or adamw(model)
    reports = []
    for start in range(0, len(data), accumulate):
        total = 0.0
        for batch in data[start : start + accumulate]:
            with monitor.micro_batch(batch):
                loss = loss_fn(model, batch) / accumulate
                loss.backward()
            total = total + loss.detach()
        reports.append(monitor.step(optimizer, total))
        optimizer.zero_grad()
    return reports


def record(monitor: "normscale.Monitor") -> RunRecord:
    monitor.close()
    return read_run(Path(monitor.run_dir))


def events(found: RunRecord, name: str) -> list[dict[str, Any]]:
    return [event for event in found.events if event["event"] == name]


def hooks(model: nn.Module) -> int:
    """Returns how many hooks stand on the modules of a model."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


MARK = 0.125


def marked(batch: Tensor) -> Tensor:
    """Returns a batch on which a poisoned model goes wrong."""
    batch = batch.clone()
    batch.view(-1)[0] = MARK
    return batch


class Poison:
    """Spoils one entry of a module's output, or of its gradient, whenever the model runs on a marked batch."""

    def __init__(
        self, model: nn.Module, module: str, value: float = float("nan"), backward: bool = False, always: bool = False
    ) -> None:
        self.value, self.backward, self.always, self.now = value, backward, always, False
        self.handles = [
            model.register_forward_pre_hook(self.look),
            model.get_submodule(module).register_forward_hook(self.spoil),
        ]

    def look(self, model: nn.Module, args: Any) -> None:
        self.now = self.always or bool(args[0].view(-1)[0] == MARK)

    def spoil(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return Spoilt.apply(output, self.value, self.backward) if self.now else None


class Spoilt(torch.autograd.Function):
    """The identity, but that one entry, of the output or of the gradient, is `value`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float, backward: bool) -> Tensor:
        ctx.value, ctx.backward = value, backward
        y = x.clone()
        if not backward:
            y.view(-1)[0] = value
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.clone()
        if ctx.backward:
            gradient.view(-1)[0] = ctx.value
        return gradient, None, None
