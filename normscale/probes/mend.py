"""Finite numbers in place of others, for passes that ask what would happen then."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normscale.probes.names import plain_name

Place = tuple[str, str]
"""A module's name and the path of a tensor that it takes or gives; "(loss)" and a path into the micro-batch."""


class Mends(NamedTuple):
    """What is mended in a pass: tensors that pass by, and parameters and buffers by their names."""

    places: frozenset[Place] = frozenset()
    own: frozenset[str] = frozenset()


def large(dtype: torch.dtype) -> float:
    """Returns what stands in place of Inf: its square is finite in `dtype`, and the exponential of minus it is 0."""
    return 128.0 if dtype == torch.float16 else 16384.0


def mended(x: Tensor) -> Tensor:
    """Returns `x` with finite numbers in place of what is not: `large` for Inf, one half for NaN.

    One half can be divided by, and have its root and its logarithm taken; 0 could not.
    """
    if not (x.is_floating_point() or x.is_complex()):
        return x
    finite: Tensor = _Mended.apply(x)  # type: ignore[no-untyped-call]
    return finite


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers that can be mended, by name: not those of which a rank has only a piece."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        plain_name(name): x
        for name, x in named
        if (x.is_floating_point() or x.is_complex())
        and x.numel()
        and not (x.is_meta or hasattr(x, "to_local") or hasattr(x, "ds_id"))
    }


@contextmanager
def own_mended(model: nn.Module, names: frozenset[str]) -> Iterator[None]:
    """Puts finite numbers into parameters and buffers, and takes them out again."""
    tensors = [x.data for name, x in own_tensors(model).items() if name in names] if names else []
    kept = [x.clone() for x in tensors]
    try:
        for x in tensors:
            x.copy_(mended(x))
        yield
    finally:
        for x, values in zip(tensors, kept, strict=True):
            x.copy_(values)


class _Mended(torch.autograd.Function):
    """Gradients pass as they are. Nothing is saved for the way back: checkpointing counts what is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        most = large(x.dtype)
        parts = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        finite = torch.nan_to_num(parts, nan=0.5, posinf=most, neginf=-most)
        return torch.view_as_complex(finite) if x.is_complex() else finite

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
