"""What a rank of DeepSpeed, ZeRO 1 to 3, holds of the averaged gradients between `backward` and `step`.

DeepSpeed's `safe_get_full_grad` puts each parameter's gradient together over ranks, a collective a parameter. Squares
need no more than the pieces where they lie, of which every entry is on one rank; they are added up with all else.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from normscale.monitor.pieces import lengths_of, norms_of


class ZeroGradients:
    """The pieces of this rank, looked up when they are asked for; `scale` is the loss scale that is still in them."""

    def __init__(self, parameters: Sequence[Tensor], device: torch.device, rank: int, scale: float | None) -> None:
        self.parameters, self.device, self.rank = list(parameters), device, rank
        self.scale = 1.0 if scale is None else scale
        self._found: list[tuple[Tensor, Tensor]] | None = None

    def present(self) -> list[Tensor]:
        """Returns the parameters of which this rank holds a piece."""
        return [p for p, _ in self._pieces()]

    def squares(self) -> Tensor:
        """Returns the sum of squares of each such piece; a sum over ranks gives that of the whole.

        Shape: result [len(present())] fp64.
        """
        grads = [grad for _, grad in self._pieces()]
        if not grads:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        norms = lengths_of(norms_of(grads), grads) if grads[0].device.type == "cpu" else norms_of(grads, torch.float64)
        return (norms / self.scale).square().to(self.device)

    def _pieces(self) -> list[tuple[Tensor, Tensor]]:
        if self._found is None:
            self._found = list(self._look())
        return self._found

    def _look(self) -> Iterator[tuple[Tensor, Tensor]]:
        for p in self.parameters:
            grad = self._shard(p) if hasattr(p, "ds_id") else _fragment(p)
            if grad is not None and grad.numel():
                yield p, grad

    def _shard(self, p: Any) -> Tensor:
        """Returns stage 3's piece, without what fills up the last rank's."""
        from deepspeed.utils import safe_get_local_grad

        part = int(p.partition_numel())
        held = min(part, max(0, int(p.ds_numel) - self.rank * part))
        grad: Tensor = safe_get_local_grad(p).detach().view(-1)[:held]
        return grad


def _fragment(p: Any) -> Tensor | None:
    """Returns the piece of stages 1 and 2, if this rank has one; some optimizers keep the whole beside it."""
    mapping = getattr(p, "_hp_mapping", None)  # an optimizer that keeps whole gradients makes none
    if mapping is None:
        return None
    grad: Tensor = mapping.get_lp_grad_fragment(p._index_in_param_group).detach().view(-1)
    at = mapping.lp_fragment_address
    return grad.narrow(0, at.start, at.numel) if grad.numel() != at.numel else grad
