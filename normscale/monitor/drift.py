"""How far training has moved what the last block puts out, on a fixed batch."""

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from normscale.errors import BadInput
from normscale.monitor.losses import StepProbe
from normscale.monitor.outputs import main_tensor
from normscale.monitor.window import shallow
from normscale.probes.buffers import AllBuffers
from normscale.probes.chance import RandomState, Sources
from normscale.probes.joint import BrokenPass, Elsewhere, Joint
from normscale.probes.probe import Subject
from normscale.probes.update import ModelUpdate


class Drift(StepProbe, ModelUpdate):
    """`ModelUpdate` of any model: F is what its last block puts out in evaluation mode, or of several, the last one."""

    def __init__(
        self, inner: nn.Module, block: nn.Module, forward: Callable[[], Any], device: torch.device, every: int
    ) -> None:
        super().__init__({}, steps=(1,), every=every)
        features = output_of(inner, block, forward)
        self.attach(Subject(sites=(), streams=1, width=0, device=device, features=features, gradient_squares=_none))


def drift_of(
    inner: nn.Module,
    blocks: Mapping[str, nn.Module],
    batch: Any,
    loss_fn: Callable[[Any, Any], Any],
    device: torch.device,
    every: int,
    joint_now: Callable[[], Joint | None],
) -> Drift | None:
    """Returns the probe of a monitor that was given a batch for it; None without one.

    `joint_now` gives what ranks say to each other around a pass; a model may be sharded between two.

    Raises:
        BadInput: the batch cannot be run, here or, where ranks make passes together, on another rank.
        BrokenPass: its pass has failed here while other ranks are still making it.
    """
    if batch is None:
        return None
    block = list(blocks.values())[-1] if blocks else inner

    def forward() -> None:
        joint = joint_now()
        with nullcontext() if joint is None else joint.passing():
            loss_fn(inner, shallow(batch))

    joint = joint_now()
    try:
        with nullcontext() if joint is None else joint.method("'update'"):
            return Drift(inner, block, forward, device, every)
    except BrokenPass:
        raise
    except Elsewhere:
        raise BadInput("Monitor(update_batch=...): its forward pass failed on another rank, which says why") from None
    except Exception as error:
        message = f"Monitor(update_batch=...): its forward pass failed ({type(error).__name__}: {error})"
        raise BadInput(message) from error


def output_of(inner: nn.Module, block: nn.Module, forward: Callable[[], Any]) -> Callable[[Any], Tensor]:
    """Returns a function that runs a forward pass and returns what a block puts out in it, with no trace left.

    Modes of modules, which may differ, buffers and random states are afterwards what they were.
    """

    def features(_: Any) -> Tensor:
        seen: list[Tensor | None] = []
        modes = [(module, module.training) for module in inner.modules()]
        random = RandomState.capture(Sources.of(inner))
        buffers = AllBuffers(inner)
        handle = block.register_forward_hook(lambda module, args, output: seen.append(main_tensor(output)))
        inner.eval()
        try:
            eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
            with torch.no_grad(), eager:  # compiled, the model would pass the hook over
                forward()
        finally:
            handle.remove()
            random.restore()
            for module, mode in modes:
                module.training = mode
            buffers.put_back(waits=False)
        if not seen or seen[-1] is None:
            raise ValueError("the last block was not run, or put out no tensor")
        return seen[-1].float().clone()

    return features


def _none() -> Tensor:
    return torch.empty(0)
