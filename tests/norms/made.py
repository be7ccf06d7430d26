"""Norms as a model makes them, for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from normscale.norms import Norm, find_norm

HEADS = 2


def made(name: str, width: int = 8, eps: float = 1e-5, **options: Any) -> Norm:
    """The norm of a model with two heads."""
    cls = find_norm(name)
    return cls(width, eps, cls.settled(cls.Options(**options), HEADS))


@contextmanager
def denormals(flush: bool) -> Iterator[None]:
    """Lets this thread flush denormal numbers to zero, or keep them."""
    if not torch.set_flush_denormal(flush) and flush:
        pytest.skip("this processor has no such flag")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
