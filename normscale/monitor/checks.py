"""What a loop can get wrong, and how it is told."""

import numbers
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from normscale.errors import BadInput
from normscale.monitor.blocks import is_deepspeed
from normscale.monitor.rows import BlockRows


def check_settings(
    model: Any, loss_fn: Any, every: Any, on_nonfinite: Any, clip: Any, update_batch: Any, uri: str | None
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
    if uri is not None:
        from normscale.tracking.mlflow_store import resolve

        resolve(uri)


def check_step(optimizer: Any, loss: Any) -> None:
    """Raises BadInput for arguments of a step that are not what they should be."""
    if not (is_deepspeed(optimizer) or hasattr(optimizer, "param_groups")):
        raise BadInput(f"monitor.step: a {type(optimizer).__name__} is no optimizer; give it first, then the loss")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return
    if isinstance(loss, bool) or not isinstance(loss, numbers.Real):
        what = f"a tensor of {loss.numel()} numbers" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise BadInput(f"monitor.step: the loss is {what}; give the window's loss as one number")


def check_hooks(rows: BlockRows, blocks: Sequence[str], first: bool) -> None:
    """Raises BadInput, before a step is made, where hooks were passed over, or saw what they cannot measure."""
    if rows.reentrant:
        raise BadInput(
            f"Monitor: {rows.reentrant!r} is checkpointed with use_reentrant=True, under which its output has "
            "no gradient to watch and nothing can be replayed; use use_reentrant=False"
        )
    if first and not any(rows.seen[: len(blocks)]):
        named = ", ".join(repr(name) for name in blocks[:3])
        raise BadInput(
            f"Monitor: none of the {len(blocks)} blocks ({named}, ...) has reported a forward pass; call the "
            "model that was given to the monitor, after micro_batch. If it was compiled and run before, hooks are "
            "passed over: make the monitor first, or compile block by block (block.forward = "
            "torch.compile(block.forward))"
        )
