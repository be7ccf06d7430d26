"""Tensors as far as a rank holds them: pieces of DTensors, and what their squares count for in a sum over ranks."""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from normscale.probes.lengths import lost
from normscale.probes.sending import sent


def is_dtensor(tensor: Tensor) -> bool:
    """Returns whether a tensor is a DTensor, without importing what few need."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """Returns the piece of a tensor that this rank holds: of a sparse one its values, of a complex one its parts.

    Shape: result that of the piece; of a complex one [..., 2].
    """
    if is_dtensor(tensor):
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()._values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def share_of(tensor: Tensor) -> float:
    """Returns what a rank's squares of a tensor count for in a sum over ranks: 1 for a shard, less for a copy."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1.0
    if not is_dtensor(tensor):
        return 1.0 / dist.get_world_size()
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    copies: int = math.prod(mesh.size(dim) for dim, place in enumerate(placements) if place.is_replicate())
    return 1.0 / copies


def norms_of(tensors: Sequence[Tensor], wide: torch.dtype = torch.float32) -> Tensor:
    """Returns the L2 norm of each tensor's piece, summed in `wide` at least; 0 of an empty one.

    Shape: result [len(tensors)], on the first one's device.
    """
    pieces = [local(tensor) for tensor in tensors]
    device = pieces[0].device
    full = [piece for piece in pieces if piece.numel()]  # a rank may hold nothing of a small tensor
    for dtype in {piece.dtype for piece in pieces}:
        wide = torch.promote_types(wide, dtype)
    if not full:
        return torch.zeros(len(pieces), dtype=wide, device=device)
    norms = torch.stack([norm.to(device) for norm in torch._foreach_norm(full, 2, dtype=wide)])
    if len(full) == len(pieces):
        return norms
    places = sent([i for i, piece in enumerate(pieces) if piece.numel()], device, torch.int64)
    return torch.zeros(len(pieces), dtype=wide, device=device).index_copy_(0, places, norms)


def lengths_of(norms: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Returns the norms of tensors, of which those summed in fp32 are at hand, so that none is lost (see `lengths`).

    Shape: norms, result [len(tensors)]; the result is fp64.
    """
    found = norms.double()
    for i in lost(found):
        found[i] = torch.linalg.vector_norm(local(tensors[i]), dtype=torch.float64)
    return found


def shared_squares(norms: Tensor, like: Sequence[Tensor]) -> Tensor:
    """Returns norms squared, times this rank's share of the tensors `like` them.

    Shape: norms, result [len(like)]; the result is fp64.
    """
    squares = norms.double().square()
    if any(is_dtensor(tensor) for tensor in like):
        return squares * sent([share_of(tensor) for tensor in like], squares.device)
    return squares * share_of(like[0])


def grouped(tensors: Sequence[Tensor]) -> Iterator[tuple[torch.device, list[Tensor]]]:
    """Gives the pieces of tensors that are not empty, in lists of one device and dtype."""
    pieces = [local(tensor) for tensor in tensors]
    for (device, _), (lists, _) in _group_tensors_by_device_and_dtype([list(pieces)]).items():
        if full := [piece for piece in lists[0] if piece is not None and piece.numel()]:
            yield device, full
