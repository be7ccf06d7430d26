"""Flushing denormal numbers to zero: a flag of each CPU thread, so that it is measured and not believed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from normscale.errors import ConfigError

KEY = "precision.flush_denormals"
GRAIN = 32768  # elements that PyTorch gives a thread at least


def flushed() -> Literal["all", "none", "some"]:
    """Returns how many of PyTorch's threads flush denormal numbers to zero."""
    ones = torch.ones(4 * GRAIN * torch.get_num_threads(), dtype=torch.int32)  # the bits of the smallest denormal
    left = int((ones.view(torch.float32) * 1.0).view(torch.int32).count_nonzero())
    return "none" if left == ones.numel() else "some" if left else "all"


@contextmanager
def denormals(flush: bool) -> Iterator[None]:
    """Gives a context in which every thread flushes denormal numbers to zero, or none does.

    The flag belongs to the calling thread, and threads that it starts later inherit it; PyTorch starts its own at the
    first large operation and keeps them. So with several threads it can be set only before that, and never taken back,
    whereas with one thread (as in a worker that trains many runs) it can be set for each run. Both are settled by
    looking at what the threads do. Vanishing gradients are denormal numbers before they are zeros.

    Raises:
        ConfigError: this processor has no such flag, or it is too late to set it in this process.
    """
    if not torch.set_flush_denormal(flush) and flush:
        raise ConfigError(f"{KEY}: true, but this processor has no such flag; set {KEY}=false", key=KEY)
    try:
        wanted = "all" if flush else "none"
        if flushed() != wanted:
            raise ConfigError(
                f"{KEY}: {str(flush).lower()} cannot be set any more, since this process has computed with"
                f" {torch.get_num_threads()} threads before; start a fresh process, or set OMP_NUM_THREADS=1",
                key=KEY,
            )
        yield
    finally:
        torch.set_flush_denormal(False)
