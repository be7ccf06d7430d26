"""What a block put out: the stream among its outputs, and the numbers that are kept of it."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from normscale.probes.lengths import length

FIRST_NAMES = ("hidden_states", "last_hidden_state", "output", "h", "x")  # of a block's outputs by name, the stream


def main_tensor(output: Any) -> Tensor | None:
    """Returns the stream in what a block returned: the tensor, a named one, or the first of floating point."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    if isinstance(output, Mapping):
        named = [output[name] for name in FIRST_NAMES if name in output]
        return _first([*named, *output.values()])
    if is_dataclass(output) and not isinstance(output, type):
        values = {one.name: getattr(output, one.name) for one in fields(output)}
        return main_tensor(values)
    if isinstance(output, Sequence) and not isinstance(output, str | bytes):
        return _first(output)
    return None


def _first(values: Sequence[Any]) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    return next((found for value in values if (found := main_tensor(value)) is not None), None) if values else None


def block_statistics(x: Tensor) -> Tensor:
    """Returns [L2 norm, largest absolute value, number of non-finite entries, sum] of `x`, in fp32 at least.

    A NaN makes all but the third NaN. It takes no copy of `x` in a wider dtype.

    Shape: x any; result [4].
    """
    x = x.detach()
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:
        return torch.zeros(4, dtype=wide, device=x.device)
    low, high = torch.aminmax(x)  # a tenth of what the maximum norm takes on a CPU
    return torch.stack(
        [
            length(x).to(wide),
            torch.maximum(-low, high).to(wide),
            torch.count_nonzero(x - x).to(wide),  # what is not finite is NaN then, and NaN is not 0
            x.sum(dtype=wide),
        ]
    )
