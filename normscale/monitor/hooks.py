"""Hooks that measure on measured steps and do nothing else: nothing in a copy of a model, nothing in a graph."""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from normscale.monitor.losses import StepProbe

See = Callable[[int, nn.Module, Any, Any], None]


class HookedProbe(StepProbe):
    """A probe whose hooks see forward passes; what one of them raises is raised again where a probe may fail.

    Attributes:
        on: whether hooks measure, which is within micro-batches of measured steps.
        failed: what a hook has raised amid someone's forward pass.
        left_out: whether a hook was left out of a graph that must not be parted.
    """

    def __init__(self) -> None:
        self.on = False
        self.failed: Exception | None = None
        self.left_out = False
        self._handles: list[Any] = []

    def open(self) -> None:
        """Lets the hooks measure, until `after_micro_batch`."""
        self.on = True

    def drop(self) -> None:
        """Forgets what was measured since `open`."""
        self.on = False

    def detach(self) -> None:
        """Takes every hook off."""
        self.on = False
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def shut(self) -> None:
        """Lets the hooks measure no longer; raises what one of them has raised."""
        self.on = False
        if self.failed is not None:
            raise self.failed

    def safely(self, see: See) -> See:
        """Returns a function for a hook that never raises, and sees passes of training alone, each once."""

        def safe(index: int, module: nn.Module, args: Any, output: Any) -> None:
            if again() or not (torch.is_grad_enabled() or module.training):  # an evaluation between
                return
            try:
                with torch.no_grad():
                    see(index, module, args, output)
            except Exception as error:
                self.on, self.failed = False, error

        return safe


def again() -> bool:
    """Returns whether this is a backward pass: activation checkpointing runs forward again in one."""
    return torch._C._current_graph_task_id() != -1


class Hook:
    """A hook of one module, before or after its forward; in a copy of the model, or one from a file, it is inert.

    `inside` says that the module may stand inside of what is compiled. A graph would end at the hook, and there would
    be one for each module, whose number it holds: there the hook is left out. So is any in a graph that must not end
    before what is compiled does, and its probe knows.
    """

    def __init__(self, probe: HookedProbe, see: See, index: int, inside: bool = False) -> None:
        self.probe, self.see, self.index, self.inside = probe, see, index, inside

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.inside and torch.compiler.is_compiling():
            return
        if self.probe.on:
            if torch.compiler.is_compiling() and must_be_whole():
                self.probe.left_out = True
            elif torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
                eagerly(self.see, self.index, module, args, output)
            else:
                self.see(self.index, module, args, output)

    def __deepcopy__(self, memo: Any) -> Any:
        return inert

    def __reduce__(self) -> Any:
        return inert_hook, ()


def inert(*args: Any) -> None:
    """Does nothing."""


def inert_hook() -> Any:
    """Returns a hook that does nothing."""
    return inert


def must_be_whole() -> bool:
    """Returns whether the graph that is being traced must not be parted: `fullgraph=True`. Torch has no public word."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    with suppress(AttributeError):  # of a thread in which nothing is traced
        return bool(InstructionTranslator.current_tx().one_graph)
    return False


# Tracing calls it, and keeps what it returns: torch._dynamo.assume_constant_result, which would import the compiler.
must_be_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]


@_disable_dynamo  # unlike torch.compiler.disable it imports the compiler only when it is called
def eagerly(see: See, index: int, module: nn.Module, args: Any, output: Any) -> None:
    """Measures outside of any graph: a row number in one would make a graph of each block."""
    see(index, module, args, output)
