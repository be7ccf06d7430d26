"""What a loop can get wrong, and how it is told."""

import inspect
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from normscale.errors import BadInput
from normscale.monitor.blocks import is_deepspeed
from normscale.monitor.counts import scheduler_steps
from normscale.monitor.rows import BlockRows

PRIVATE = ("_amp_foreach_non_finite_check_and_unscale_", "_foreach_norm")  # of torch, and without a public name


def check_torch() -> None:
    """Raises BadInput for a torch without what gradients are looked at by."""
    for name in PRIVATE:
        if not hasattr(torch, name):
            raise BadInput(f"Monitor: torch {torch.__version__} has no torch.{name}; install torch 2.11, which has it")


def check_settings(
    model: Any,
    loss_fn: Any,
    name: Any,
    runs: Any,
    every: Any,
    on_nonfinite: Any,
    clip: Any,
    update_batch: Any,
    logits: Any,
    config: Any,
    uri: Any,
) -> None:
    """Raises BadInput for settings that cannot be, before anything is attached or written."""
    whole = isinstance(on_nonfinite, int) and not isinstance(on_nonfinite, bool) and on_nonfinite > 0
    if not isinstance(model, nn.Module):
        raise BadInput(f"Monitor: the model is a {type(model).__name__}; give the nn.Module that the loop calls")
    if loss_fn is not None and not callable(loss_fn):
        raise BadInput("Monitor(loss_fn=...): give a function (model, batch) -> loss, or None")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise BadInput(f"Monitor(every={every!r}): give a number of steps, 1 or more")
    if on_nonfinite not in ("skip", "stop") and not whole:
        raise BadInput(f'Monitor(on_nonfinite={on_nonfinite!r}): give "skip", "stop" or a number of steps in a row')
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise BadInput(f"Monitor(clip={clip!r}): give a norm above 0, or None")
    if update_batch is not None and loss_fn is None:
        raise BadInput("Monitor(update_batch=...): takes loss_fn, which says how a batch is run; give it, too")
    if logits is not None and not isinstance(logits, str):
        raise BadInput(f"Monitor(logits=...): is a {type(logits).__name__}; give the name of a module, or None")
    if not isinstance(name, str):
        raise BadInput(f"Monitor(name={name!r}): is a {type(name).__name__}; give a text")
    if not isinstance(runs, str | os.PathLike):
        raise BadInput(f"Monitor(runs={runs!r}): is a {type(runs).__name__}; give a folder")
    if config is not None and not isinstance(config, Mapping):
        raise BadInput(f'Monitor(config=...): is a {type(config).__name__}; give settings by name, as {{"lr": 1e-3}}')
    if uri is not None and not isinstance(uri, str):
        raise BadInput(f'Monitor(uri={uri!r}): is a {type(uri).__name__}; give a store, as "sqlite:///mlflow.db"')
    if uri is not None:
        from normscale.tracking.address import resolve

        resolve(uri)


def check_alarms(stalled: Any, spike_sigmas: Any, spike_window: Any) -> None:
    """Raises BadInput for settings of alarms that cannot be."""
    for name, value, least in (("stalled", stalled, 1), ("spike_window", spike_window, 2)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadInput(f"Monitor({name}={value!r}): give a number of steps, {least} or more")
    if not isinstance(spike_sigmas, int | float) or isinstance(spike_sigmas, bool) or not 0 < spike_sigmas < math.inf:
        raise BadInput(f"Monitor(spike_sigmas={spike_sigmas!r}): give a number of standard deviations above 0")


def check_step(optimizer: Any, loss: Any, grad_norm: Any, scheduler: Any) -> None:
    """Raises BadInput for arguments of a step that are not what they should be."""
    if not (is_deepspeed(optimizer) or hasattr(optimizer, "param_groups")):
        raise BadInput(f"monitor.step: a {type(optimizer).__name__} is no optimizer; give it first, then the loss")
    own: Any = type(getattr(optimizer, "optimizer", optimizer))  # of an optimizer that Accelerate has prepared
    if not is_deepspeed(optimizer) and _takes_closure(own):
        raise BadInput(
            f"monitor.step: {own.__name__} runs the model again within its step, by a closure; such an optimizer "
            "cannot be monitored"
        )
    if odd := _odd(loss):
        raise BadInput(f"monitor.step: the loss is {odd}; give the window's loss as one number")
    if grad_norm is not None and (odd := _odd(grad_norm)):
        raise BadInput(f"monitor.step: grad_norm is {odd}; give the norm as one number, or leave it out")
    if scheduler is not None and scheduler_steps(scheduler, 1) is None:
        raise BadInput(f"monitor.step: scheduler= is a {type(scheduler).__name__}, which counts no steps; leave it out")


def check_window(micro_batches: int, same: bool) -> None:
    """Raises BadInput where a step has no micro-batch; `same` says whether the step before was this optimizer's."""
    if micro_batches:
        return
    if same:
        raise BadInput(
            "monitor.step: no micro-batch since the last step; call monitor.micro_batch(batch) before each forward"
        )
    raise BadInput(
        "monitor.step: no micro-batch since the step of another optimizer; a window has one optimizer: with several, "
        "call monitor.micro_batch(batch) before the forward of each"
    )


def numbers_of(values: Any) -> dict[str, float]:
    """Returns a loop's own numbers by name.

    Raises:
        BadInput: they are no numbers, or have no names.
    """
    if not isinstance(values, Mapping):
        raise BadInput(f'monitor.log: is a {type(values).__name__}; give numbers by name, as {{"accuracy": 0.9}}')
    for name, value in values.items():
        if not isinstance(name, str):
            raise BadInput(f"monitor.log: the name {name!r} is a {type(name).__name__}; give a text")
        if odd := _odd(value, or_bool=True):
            raise BadInput(f"monitor.log: {name!r} is {odd}; give one number")
    return {name: float(value) for name, value in values.items()}


def _odd(value: Any, or_bool: bool = False) -> str:
    """Returns what something is that is not one real number; "" where it is one."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            return f"a tensor of {value.numel()} numbers"
        return "complex" if value.is_complex() else ""
    if isinstance(value, bool):
        return "" if or_bool else "a bool"
    if not isinstance(value, numbers.Real):
        return f"a {type(value).__name__}"
    try:
        float(value)
    except OverflowError:
        return "too large for a floating-point number"
    return ""


@cache
def _takes_closure(kind: Any) -> bool:
    """Returns whether an optimizer's step cannot be made without a closure."""
    try:
        _, *rest = inspect.signature(kind.step).parameters.values()
    except (AttributeError, TypeError, ValueError):  # something that only works like an optimizer
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.kind in positional and one.default is inspect.Parameter.empty for one in rest)


def check_hooks(rows: BlockRows, blocks: Sequence[str], first: bool) -> None:
    """Raises BadInput, before a step is made, where hooks were passed over, or saw what they cannot measure."""
    if rows.reentrant:
        raise BadInput(
            f"Monitor: {rows.reentrant!r} is checkpointed with use_reentrant=True, under which its output has "
            "no gradient to watch and nothing can be replayed; use use_reentrant=False"
        )
    if first and not any(rows.seen[: len(blocks)]) and not rows.left_out:
        named = ", ".join(repr(name) for name in blocks[:3])
        if rows.odd:
            raise BadInput(
                f"Monitor: the {len(blocks)} blocks ({named}, ...) return a {rows.odd}, in which no tensor of real "
                "numbers is found; name modules that return one, or tensors in a tuple, mapping or dataclass, with "
                "Monitor(blocks=...)"
            )
        raise BadInput(
            f"Monitor: none of the {len(blocks)} blocks ({named}, ...) has reported a forward pass; call the "
            "model that was given to the monitor, after micro_batch. If it was compiled and run before, hooks are "
            "passed over: make the monitor first, or compile block by block (block.forward = "
            "torch.compile(block.forward)). If these modules are not called, name others with Monitor(blocks=...)"
        )
