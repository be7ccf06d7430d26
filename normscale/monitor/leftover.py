"""A bad gradient of a step that was not applied: whether the loop zeroed it before the next one came."""

import torch
from torch import Tensor

from normscale.monitor.pieces import local


class Leftover:
    """Looks at a parameter's gradient when the next one arrives to be added to it.

    Loops may zero gradients anywhere before their backward, in place or by taking them away, and DDP may put the next
    one into the same tensor: only then is it known. The hook that looks is there for one window after a bad step. It
    does not see gradients that FSDP2 adds up itself: of those it is asked at the end whether what was bad is bad.
    """

    def __init__(self, parameter: Tensor, gradient: Tensor) -> None:
        self.parameter = parameter
        self._bad = ~torch.isfinite(local(gradient))
        self._seen: Tensor | None = None
        self._handle = parameter.register_hook(self._look)  # type: ignore[no-untyped-call]

    def remains(self) -> bool:
        """Returns whether the gradient was not zeroed, and looks no longer; the host reads."""
        self.remove()
        return bool(self._still() if self._seen is None else self._seen)

    def remove(self) -> None:
        """Takes the hook off."""
        self._handle.remove()

    def _look(self, arriving: Tensor) -> None:
        if self._seen is None:
            self._seen = self._still()

    @torch.no_grad()
    def _still(self) -> Tensor:
        """Returns whether entries that were bad are bad now, a tensor of one bool."""
        gradient = None if self.parameter.grad is None else local(self.parameter.grad)
        if gradient is None or gradient.shape != self._bad.shape:
            return torch.zeros((), dtype=torch.bool)
        return (self._bad & ~torch.isfinite(gradient)).any()
