"""The tensors inside what modules take and give, and what is not finite in them."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

Kind = Literal["NaN", "+Inf", "-Inf"]

DEEPEST = 8  # containers inside containers that are looked into


@dataclass(frozen=True)
class Counts:
    """What is not finite in one tensor of `of` entries."""

    nan: int
    pos_inf: int
    neg_inf: int
    of: int

    @property
    def kind(self) -> Kind:
        """The gravest kind: NaN before +Inf before -Inf."""
        return "NaN" if self.nan else "+Inf" if self.pos_inf else "-Inf"

    @property
    def like_a_mask(self) -> bool:
        """Whether -Inf is all there is, as in a mask that is added to scores."""
        return not (self.nan or self.pos_inf)


def counted(x: Tensor) -> Counts | None:
    """Returns what is not finite in a tensor; None where all is, and for integers, which always are.

    Of a DTensor this rank's piece is looked at. It reads the result on the host.
    """
    if not (x.is_floating_point() or x.is_complex()) or x.is_meta:
        return None
    with torch.no_grad():
        x = x.detach()
        if hasattr(x, "to_local"):
            x = x.to_local()
        if x.layout is torch.sparse_coo:
            x = x.coalesce().values()
        elif x.layout is not torch.strided:
            return None
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
        if x.element_size() == 1:  # 8-bit formats have no isfinite
            x = x.float()
        if bool(torch.isfinite(x).all()):
            return None
        found = torch.stack([torch.isnan(x).sum(), torch.isposinf(x).sum(), torch.isneginf(x).sum()])
    nan, pos_inf, neg_inf = (int(n) for n in found.tolist())
    return Counts(nan, pos_inf, neg_inf, x.numel())


def leaves(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Gives every tensor in nested tuples, lists, mappings and dataclasses, with its path, as in output.h[1]."""
    if isinstance(value, Tensor):
        yield path, value
    elif depth < DEEPEST:
        for _, suffix, part in _parts(value):
            yield from leaves(part, path + suffix, depth + 1)


def mapped(value: Any, path: str, change: Callable[[str, Tensor], Tensor], copies: bool, depth: int = 0) -> Any:
    """Returns `value` with change(path, tensor) in place of each tensor, and `value` itself where that changes nothing.

    Containers that can be written to may be written to by whoever gets them. They are only looked into with `copies`,
    and then a changed one is a copy.
    """
    if isinstance(value, Tensor):
        return change(path, value)
    if depth >= DEEPEST or not (copies or isinstance(value, tuple)):
        return value
    parts = _parts(value)
    new = {key: mapped(part, path + suffix, change, copies, depth + 1) for key, suffix, part in parts}
    changed = {key: new[key] for key, _, part in parts if new[key] is not part}
    if not changed:
        return value
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            return cast(Any, value)._replace(**changed)
        rebuilt = cast(Callable[[list[Any]], Any], type(value))
        return rebuilt([new[i] for i in range(len(value))])  # a subclass without names takes one sequence
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        return dataclasses.replace(cast(Any, value), **changed)
    shallow = copy(value)
    for key, part in changed.items():
        shallow[key] = part
    return shallow


def _parts(value: Any) -> list[tuple[Any, str, Any]]:
    """Returns key, suffix of the path, and value of everything directly inside a container; nothing for the rest."""
    if isinstance(value, Mapping):
        return [(key, f".{key}", part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(name, f".{name}", getattr(value, name)) for name in value._fields]
    if isinstance(value, tuple | list):
        return [(i, f"[{i}]", part) for i, part in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return [(name, f".{name}", getattr(value, name)) for name in fields if hasattr(value, name)]
    return []
