"""The bytes of all tensors that are alive while something runs, by what they are for.

Only storages that operations make are counted: what was there before (parameters, their gradients, constants) belongs
to the engine. Fake tensors have storages without memory, so that a pass over a large batch costs nothing here.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Purpose = Literal["casts", "blocks", "ends", "head", "backward"]
"""Casts: copies of weights in the compute dtype; ends: embeddings and final norms; head: logits and loss; backward:
gradients on their way and what is computed again."""


@dataclass(frozen=True)
class Moment:
    """The bytes alive at a place, and the most that were alive since the place before, by purpose.

    `made` are those alive that each block has made in its forward pass.
    """

    place: str
    now: Counter[str]
    most: Counter[str]
    made: dict[int, Counter[str]]


@dataclass
class _Kept:
    """One storage: its bytes, what it is for, the block that made it (-1: none), and what tells of its end."""

    bytes: int
    purpose: Purpose
    block: int
    end: "weakref.ref[Any]" = field(repr=False)


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages made inside the block; `mark` names a place, `moments` are what was seen at all of them.

    Peaks are of whole operations: what a kernel takes inside and gives back is not seen.
    """

    def __init__(self, owned: Iterable[Tensor], weights: Iterable[Tensor]) -> None:
        """Takes the tensors that are not counted, and the ones among them whose copies are casts."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.purpose: Purpose = "ends"
        self.block = -1  # that runs forward
        self.moments: list[Moment] = []
        self._next: list[str] = []
        self._kept: dict[int, _Kept] = {}
        self._now: Counter[str] = Counter()
        self._made: dict[int, Counter[str]] = {}
        self._most, self._most_total, self._total = Counter[str](), 0, 0
        self._owned = {_address(tensor) for tensor in owned}
        self._weights = {_address(tensor) for tensor in weights}

    def mark_next(self, place: str) -> None:
        """Does `mark` when the next operation begins: what the caller still holds is let go of until then."""
        self._next.append(place)

    def mark(self, place: str) -> None:
        """Notes what is alive here, and begins to look for the next peak."""
        made = {block: Counter(counted) for block, counted in self._made.items()}
        self.moments.append(Moment(place, Counter(self._now), Counter(self._most), made))
        self._most, self._most_total = Counter(self._now), self._total

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        while self._next:
            self.mark(self._next.pop(0))
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf, func, args)
        if self._total > self._most_total:
            self._most, self._most_total = Counter(self._now), self._total
        return out

    def _see(self, tensor: Tensor, func: Any, args: tuple[Any, ...]) -> None:
        address = _address(tensor)
        if address in self._kept or address in self._owned:
            return
        copied = func is torch.ops.aten._to_copy.default and _address(args[0]) in self._weights
        purpose: Purpose = "casts" if copied else self.purpose
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        kept = _Kept(
            size, purpose, self.block, weakref.ref(storage, lambda _: self._count(self._kept.pop(address), -1))
        )
        self._kept[address] = kept
        self._count(kept, 1)

    def _count(self, kept: _Kept, times: int) -> None:
        self._now[kept.purpose] += times * kept.bytes
        self._total += times * kept.bytes
        if kept.block >= 0:
            self._made.setdefault(kept.block, Counter())[kept.purpose] += times * kept.bytes


def _address(tensor: Tensor) -> int:
    """Returns what two tensors share exactly when they share memory; fake ones have no address of data."""
    address: int = tensor.untyped_storage()._cdata
    return address
