"""Small tensors of many modules that are worked on together: one by one, each operation on them would cost a launch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normscale.ops.sampled import spread

MOST = 2**17  # entries that wait at most: 1 MB, and some ten times as much while they are worked on

Work = Callable[[Sequence[int], Any, Sequence[Tensor]], None]


class Gathered:
    """Calls `work` with the numbers of modules, what they have in common, and their tensors, stacked."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.clear()

    def clear(self) -> None:
        """Forgets what waits."""
        self._waiting: dict[Any, tuple[Any, list[int], list[Sequence[Tensor]]]] = {}
        self._entries = 0

    def add(self, index: int, common: Any, tensors: Sequence[Tensor]) -> None:
        """Takes tensors of a module; those of modules that have devices, shapes and `common` in common are stacked."""
        key = (common, *((tensor.device, tensor.shape) for tensor in tensors))
        _, indices, rows = self._waiting.setdefault(key, (common, [], []))
        indices.append(index)
        rows.append(tensors)
        self._entries += sum(tensor.numel() for tensor in tensors)
        if self._entries >= MOST:
            self.flush()

    def flush(self) -> None:
        """Works on all that waits."""
        waiting = self._waiting
        self.clear()
        for common, indices, rows in waiting.values():
            self.work(indices, common, [torch.stack(each) for each in zip(*rows, strict=True)])


def rows_of(x: Tensor, most: int) -> Tensor:
    """Returns at most `most` rows of `x`, as `ops.sampled.spread` takes them, as a copy.

    Shape: x [..., D]; result [rows, D] fp64.
    """
    return spread(x.detach(), most).to(torch.float64, copy=True).flatten(0, -2)
