"""The buffers that forward passes write, such as running averages: as they were before a window, or before a replay."""

from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn


class _Copy(NamedTuple):
    """A buffer of a module, and its values."""

    path: str
    module: nn.Module
    name: str
    buffer: Tensor
    values: Tensor

    @classmethod
    def of(cls, path: str, module: nn.Module, name: str, buffer: Tensor) -> "_Copy":
        return cls(path, module, name, buffer, buffer.detach().clone())

    @property
    def now(self) -> Tensor | None:
        """What the module has by this name; None where that was taken away, or cannot be compared."""
        buffer = self.module._buffers.get(self.name)
        return buffer if comparable(buffer) else None

    def changed(self) -> Tensor:
        """Returns whether the module has other values by now, a tensor of one bool; NaN is as good as NaN."""
        now = self.now
        if now is None or now.shape != self.values.shape or now.dtype != self.values.dtype:
            return torch.ones((), dtype=torch.bool, device=self.values.device)
        now = now.detach().to(self.values.device)
        return ~((now == self.values) | ((now != now) & (self.values != self.values))).all()

    def put_back(self) -> None:
        """Gives the module its buffer with these values."""
        if self.buffer.shape != self.values.shape:
            self.module._buffers[self.name] = self.values.clone()
            return
        lies = zip(self.buffer.shape, self.buffer.stride(), strict=True)
        if all(size < 2 or stride for size, stride in lies):  # to one that is expanded nobody can have written
            self.buffer.data.copy_(self.values)  # not a new version: a graph that holds it can still go back
        self.module._buffers[self.name] = self.buffer


def comparable(buffer: Tensor | None) -> TypeGuard[Tensor]:
    """Returns whether a buffer can be compared with a copy, which one that is sparse or nested cannot."""
    return buffer is not None and buffer.layout is torch.strided and not buffer.is_nested


class AllBuffers:
    """Every buffer of a model as it is, to put back what a pass changes; all that are `comparable`."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            _Copy.of(name, module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if comparable(buffer)
        ]

    def put_back(self, waits: bool = True) -> None:
        """Puts back what has changed; constants are not written to.

        What that is the host has to ask a GPU. Where nobody `waits` for one, all that lies there is put back.
        """
        for kept in self._kept:
            ask = waits or kept.values.device.type == "cpu"
            if not ask or kept.now is not kept.buffer or bool(kept.changed()):
                kept.put_back()


class WindowBuffers:
    """The buffers as they were when the window began, to undo a step that is not applied.

    Only what a checkpoint holds is state: buffers that are not persistent are constants or caches, and cost nothing.
    Nor do those that are not `comparable`: what a forward pass writes to one of them stays.
    Which of the others are written is asked once, over the first window: those are kept for each window, with all
    others of their modules (a batch norm's counter tells of its averages). One that is written later for the first time
    is found when a step is not applied: what it has become stays, it is named, and it is kept from then on. One that
    its owner has taken away between two windows is not put back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._candidates = [
            (f"{path}.{name}" if path else name, module, name)
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if comparable(buffer) and name not in module._non_persistent_buffers_set
        ]
        self._kept: list[_Copy] = []
        self._gone: set[str] = set()  # those of them that were not there when the window began
        self._others: list[_Copy] = []  # as they were in the first window
        self._asked = not self._candidates

    def begin(self) -> None:
        """Takes the values at the beginning of a window; the host does not wait."""
        if not self._asked:
            given = [(path, m, name, m._buffers.get(name)) for path, m, name in self._candidates]
            self._kept = [_Copy.of(path, m, name, buffer) for path, m, name, buffer in given if comparable(buffer)]
            return
        from_now, into = [], []
        self._gone = {kept.path for kept in self._kept if kept.now is None}
        for i, kept in enumerate(self._kept):
            now, values = kept.now, kept.values
            if now is None:
                continue
            if now.shape != values.shape or now.dtype != values.dtype or now.device != values.device:
                self._kept[i] = _Copy.of(kept.path, kept.module, kept.name, now)
                continue
            self._kept[i] = kept._replace(buffer=now)
            from_now.append(now.detach())
            into.append(values)
        if into:
            torch._foreach_copy_(into, from_now)

    def applied(self) -> None:
        """Says that the step is made, so that what was written stays; after the first window the host reads once."""
        if not self._asked and self._kept:
            self._asked = True
            self._keep({kept.module for kept in _changed(self._kept)})

    def put_back(self) -> list[str]:
        """Undoes what the window wrote; returns the names of written buffers that could not be put back."""
        self.applied()
        late = _changed([kept for kept in self._others if kept.now is not None])
        for kept in self._kept:
            if kept.path not in self._gone:
                kept.put_back()
        if late:
            self._keep({kept.module for kept in [*self._kept, *late]})
        return [kept.path for kept in late]

    def _keep(self, writing: set[nn.Module]) -> None:
        """Keeps the buffers of some modules from now on."""
        everything = [*self._kept, *self._others]
        self._kept = [kept for kept in everything if kept.module in writing]
        self._others = [kept for kept in everything if kept.module not in writing]


def _changed(buffers: list[_Copy]) -> list[_Copy]:
    """Returns those that have other values by now; the host reads once."""
    if not buffers:
        return []
    flags = torch.stack([kept.changed().to(buffers[0].values.device) for kept in buffers]).tolist()
    return [kept for kept, flag in zip(buffers, flags, strict=True) if flag]
