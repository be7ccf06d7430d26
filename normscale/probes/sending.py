"""Numbers of the host on their way to a device, for which nobody waits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sent(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns numbers, or lists of them, as a tensor on a device.

    `torch.tensor(values, device=...)` would make the host wait for a GPU: it copies from memory that the device cannot
    read by itself. Here it can, and torch keeps that memory until it has.
    """
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)
