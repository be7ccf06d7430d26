"""Entries spread evenly over the tensors of every block, as one vector: what is kept and read of them all is little."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from normscale.monitor.pieces import local, share_of
from normscale.probes.segments import sample_of
from normscale.probes.sending import sent
from normscale.probes.weights import ENTRIES

LEAST = 64  # entries of a tensor that are taken at least, or all it has

Cut = tuple[tuple[int, int], tuple[int, int]]
"""Sizes and strides of a view."""


class Samples:
    """Which entries are taken of the tensors of some groups: of at most `most` in all, all; else as many of each.

    Attributes:
        partial: for each group, whether not all of its entries are taken.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], device: torch.device, most: int = ENTRIES) -> None:
        tensors = [tensor for group in groups for tensor in group]
        self.sizes, self.device, self.groups = sizes_of(tensors), device, len(groups)
        self.share = max(LEAST, most // max(1, len(tensors))) if sum(self.sizes) > most else None
        with torch.no_grad():
            taken = [_taken(local(tensor), self.share).numel() for tensor in tensors]
        owner = [i for i, group in enumerate(groups) for _ in group]
        self.partial = [False] * len(groups)
        for i, size, n in zip(owner, self.sizes, taken, strict=True):
            self.partial[i] |= n < size
        weights = [share_of(x) * size / max(1, n) for x, size, n in zip(tensors, self.sizes, taken, strict=True)]
        self._group_of = sent(owner, device, torch.int64)
        self._weights = sent(weights, device)
        lengths = sent(taken, device, torch.int64)
        self._tensor_of = torch.repeat_interleave(
            lengths, output_size=sum(taken)
        )  # a size that is known is not awaited

    def fit(self, tensors: Sequence[Tensor], device: torch.device) -> bool:
        """Returns whether tensors are still of these sizes, and on this device."""
        return self.device == device and self.sizes == sizes_of(tensors)

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the entries, as a copy, of tensors of the same shapes and strides.

        Shape: result [entries].
        """
        taken = [_taken(local(tensor), self.share) for tensor in tensors]
        return torch.cat([each if each.device == self.device else each.to(self.device) for each in taken])

    def spread(self, values: Tensor) -> Tensor:
        """Returns a number a tensor as one an entry.

        Shape: values [tensors]; result [entries].
        """
        return values[self._tensor_of]

    def sums(self, values: Tensor) -> Tensor:
        """Returns the sum by group of what has a number an entry: a sum over ranks is that of all entries, or near it.

        Shape: values [entries]; result [groups] fp64.
        """
        each = torch.zeros(len(self.sizes), dtype=torch.float64, device=self.device)
        each.index_add_(0, self._tensor_of, values.double()).mul_(self._weights)
        return torch.zeros(self.groups, dtype=torch.float64, device=self.device).index_add_(0, self._group_of, each)


def sizes_of(tensors: Sequence[Tensor]) -> list[int]:
    """Returns how many entries of each tensor are here."""
    return [local(tensor).numel() for tensor in tensors]


def _taken(piece: Tensor, share: int | None) -> Tensor:
    """Returns the entries that are taken of a tensor, as a view where it is dense; else it is taken whole.

    Shape: result [entries].
    """
    cut = None if share is None else _cut(piece.shape, piece.stride(), share)
    return piece.reshape(-1) if cut is None else piece.as_strided(*cut).reshape(-1)


@lru_cache(maxsize=4096)  # a deep model has thousands of tensors, of a few shapes
def _cut(shape: tuple[int, ...], strides: tuple[int, ...], share: int) -> Cut | None:
    """Returns what is taken of a tensor, as a view of it; None where it is not dense."""
    as_it_lies = torch.empty_strided(shape, strides, device="meta")
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    if not as_it_lies.permute(order).is_contiguous():
        return None
    lines, width, step = sample_of(as_it_lies.numel(), share)
    return (lines, width), (step, 1)
