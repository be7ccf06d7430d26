"""Constants of a module, which a cast of the module leaves as wide as they are."""

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn


class Constants(nn.Module):
    """A module whose buffers outside the state dict, its constants, follow it to a device but to no narrower dtype.

    `module.half()` casts every buffer: an eps of 1e-8 would be 0 in fp16, and a multiplier of the residual rounded to
    eight bits in bf16, while the numbers that a configuration has say otherwise.
    """

    def _apply(self, fn: Callable[[Tensor], Any], recurse: bool = True) -> Self:
        before = {name: self._buffers[name] for name in self._non_persistent_buffers_set}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, constant in before.items():
            moved = self._buffers[name]
            if constant is not None and moved is not None and moved.dtype.itemsize < constant.dtype.itemsize:
                self._buffers[name] = constant.to(moved.device)
        return self
