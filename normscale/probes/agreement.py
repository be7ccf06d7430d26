"""One culprit for all ranks: the earliest of what each has found."""

import json
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from normscale.probes.culprit import Culprit

NONE = 2**63 - 1  # the key of a rank that has found nothing
FIELDS_BYTES = 8192  # what the winner sends; longer fields lose propagators, then the note

_KINDS = ("NaN", "+Inf", "-Inf")
_LATE = ("backward", "reduction", "norm")
_WIDTHS = {"unsure": 1, "micro_batch": 15, "late": 1, "order": 23, "kind": 2, "rank": 20}  # bits, the highest first


def agree(culprit: Culprit | None) -> Culprit | None:
    """Returns the earliest culprit that any rank has found, the same on every rank; None where none has.

    Every rank calls it. Earlier is, in this order: reproduced before not, then by micro-batch, forward before backward,
    place in the micro-batch, NaN before +Inf before -Inf, rank. It takes one reduction of one integer and, where there
    is a culprit, one broadcast; with one process neither.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return culprit
    rank, device = dist.get_rank(), meeting_place()
    own = NONE if culprit is None else key_of(culprit, rank)
    keys = torch.tensor([own], dtype=torch.int64, device=device)
    dist.all_reduce(keys, dist.ReduceOp.MIN)
    earliest = int(keys)
    if earliest == NONE:
        return None
    sender = earliest & (2 ** _WIDTHS["rank"] - 1)
    sent = torch.zeros(FIELDS_BYTES, dtype=torch.uint8, device=device)
    if culprit is not None and own == earliest:
        _write(sent, replace(culprit, rank=rank))
    dist.broadcast(sent, src=sender)
    return Culprit.from_fields(json.loads(bytes(sent.tolist()).rstrip(b"\0")))


def key_of(culprit: Culprit, rank: int) -> int:
    """Returns the number that is smaller the earlier a culprit is; its lowest bits are the rank."""
    values = {
        "unsure": int(not culprit.reproduced),
        "micro_batch": culprit.micro_batch + 1,
        "late": int(culprit.phase in _LATE),
        "order": culprit.order,
        "kind": _KINDS.index(culprit.kind),
        "rank": rank,
    }
    key = 0
    for name, width in _WIDTHS.items():
        key = key << width | min(max(values[name], 0), 2**width - 1)
    return key


def meeting_place() -> torch.device:
    """Returns the device whose tensors the process group can reduce."""
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _write(sent: Tensor, culprit: Culprit) -> None:
    """Puts a culprit's fields into the buffer, shorter if they must be."""
    shorter = (culprit, replace(culprit, propagators=()), replace(culprit, propagators=(), note=""))
    texts = (json.dumps(each.fields()).encode() for each in shorter)
    text = next(text for text in texts if len(text) <= FIELDS_BYTES)
    sent[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device=sent.device)
