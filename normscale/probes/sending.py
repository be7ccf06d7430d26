"""Numbers on their way to a device and back, for which nobody waits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def sent(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns numbers, or lists of them, as a tensor on a device.

    `torch.tensor(values, device=...)` would make the host wait for a GPU: it copies from memory that the device cannot
    read by itself. Here it can, and torch keeps that memory until it has.
    """
    pinned = device.type == "cuda"
    held = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=pinned)  # whatever device is the default
    return held.to(device, non_blocking=True)


def _cuda_copied(device: torch.device) -> Callable[[], None]:
    with torch.cuda.device(device):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


COPIED: dict[str, Callable[[torch.device], Callable[[], None]]] = {"cuda": _cuda_copied}
"""By the type of a device that copies while the host goes on: its device -> what waits for all that it has to do now.

Of any other, the host waits for the copy itself.
"""


class Fetched:
    """A tensor on its way from a device to the host.

    `ready` says that it is there without waiting, as one is that lay on the host.
    """

    def __init__(self, values: Tensor) -> None:
        device = values.device
        copied = COPIED.get(device.type)
        self._wait: Callable[[], None] | None = None
        if copied is None:
            self._host = values.cpu()
        else:
            pinned = device.type == "cuda"
            self._host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=pinned)
            self._host.copy_(values, non_blocking=True)
            self._wait = copied(device)

    @property
    def ready(self) -> bool:
        return self._wait is None

    def arrived(self) -> Tensor:
        """Returns the tensor on the host; it waits if the device has not come so far."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._host
