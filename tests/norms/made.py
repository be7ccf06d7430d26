"""Norms as a model makes them, for tests."""

from typing import Any

from normscale.norms import Norm, find_norm

HEADS = 2


def made(name: str, width: int = 8, eps: float = 1e-5, **options: Any) -> Norm:
    """The norm of a model with two heads."""
    cls = find_norm(name)
    return cls(width, eps, cls.settled(cls.Options(**options), HEADS))
