"""Which streams may have their mean taken out where they are written, so that LayerNorms that read them need not.

A LayerNorm takes the mean out of each row. Where all that is written into a stream has mean 0 by itself, so has every
sum, and LayerNorm is RMSNorm. What writes is centred once, in its weights: W - 1 (1^T W) / d for a projection, each
row minus its mean for a table. It changes nothing for LayerNorms, and everything for whatever else reads the stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from normscale.fold.affine import Blocked, scale_of
from normscale.fold.flow import Flow, Op
from normscale.models.projection import Projection
from normscale.models.stack import Transformer
from normscale.norms import Norm

MEANLESS = "layernorm"
PASSES = ("getitem", "clone", "contiguous", "to", "float", "double")


@dataclass
class Stream:
    """What is summed, from all that writes into it to all that reads it: names of tensors, and of norms.

    `stays` says why the mean has to stay in.
    """

    writers: list[str] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)
    stays: str | None = None


def streams_of(model: Transformer, flow: Flow) -> list[Stream]:
    """Returns the streams that LayerNorms read, in the order of the pass."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    search = _Search(model, flow, {id(tensor): name for name, tensor in tensors})
    norms = {name for name, m in model.named_modules() if isinstance(m, Norm) and m.name == MEANLESS}
    return [search.stream(op.inputs[0]) for op in flow.ops if op.norm in norms and id(op.inputs[0]) not in search.seen]


class _Search:
    """Goes from a tensor to all that it is a part of in sums, and to all that is a part of it."""

    def __init__(self, model: Transformer, flow: Flow, names: Mapping[int, str]) -> None:
        self.model, self.flow, self.names = model, flow, names
        self.seen: set[int] = set()

    def stream(self, start: Tensor) -> Stream:
        """Returns the stream that a tensor is a part of."""
        found, ahead = Stream(), [start]
        while ahead:
            x = ahead.pop()
            if id(x) in self.seen:
                continue
            self.seen.add(id(x))
            maker = self.flow.maker(x)
            for step in (partial(self._made, x, maker), *(partial(self._read, x, op) for op in self.flow.readers(x))):
                try:
                    ahead += step(found)
                except Blocked as reason:
                    found.stays = found.stays or str(reason)
        return found

    def _made(self, x: Tensor, op: Op | None, found: Stream) -> list[Tensor]:
        """Returns the parts of the stream that x is made of, and notes what writes."""
        if op is None:
            name = self.names.get(id(x))
            if name is None or x.shape[-1] != self.model.d:
                raise Blocked("what it reads holds an input of the model")
            found.writers.append(name)
            return []
        if op.name == "linear" and id(op.call[1]) in self.names:
            name = self.names[id(op.call[1])]
            if not isinstance(self.model.get_submodule(name.rpartition(".")[0]), Projection):
                raise Blocked(f"{name}, which writes what it reads, is no projection")
            if len(self.flow.readers(op.call[1])) > 1:
                raise Blocked(f"{name}, which writes what it reads, is used elsewhere too")
            found.writers.append(name)
            return []
        parts = _parts(op)
        if not parts:
            what = f"the norm {op.norm}" if op.norm else f"the operation {op.name}"
            raise Blocked(f"what it reads is no sum of projections: {what} is in it")
        return parts

    def _read(self, x: Tensor, op: Op, found: Stream) -> list[Tensor]:
        """Returns the parts of the stream that x is a part of, and notes the norms that read it."""
        if op.norm is not None:
            kind = self.model.get_submodule(op.norm).name
            if kind != MEANLESS:
                raise Blocked(f"{op.norm} ({kind}) reads the same, with its mean")
            found.readers.append(op.norm)
            return []
        if op.name == "linear" and op.call[1] is x is self.model.token:
            return []  # a tied head, which gets weights of its own
        if any(x is part for part in _parts(op)):
            return list(op.outputs)
        name = self.names.get(id(op.call[1])) if op.name == "linear" else None
        raise Blocked(f"{name or op.name} reads the same, without a norm")


def _parts(op: Op) -> list[Tensor]:
    """Returns the inputs that an operation sums (times numbers), so that its mean is 0 where theirs are; none: else."""
    if op.name in ("add", "iadd", "radd", "sub", "isub") and len(op.call) == 2:
        return list(op.inputs) if len(op.inputs) == 2 and min(x.ndim for x in op.inputs) else []
    if op.name == "addcmul" and len(op.inputs) == 3 and op.inputs[2].ndim == 0:
        return list(op.inputs[:2])
    if op.name in PASSES and not (op.name == "getitem" and isinstance(op.call[1], tuple)):
        return [op.inputs[0]]
    return [x for x in op.inputs if x.ndim and scale_of(op, x) is not None]


def centred(x: Tensor) -> Tensor:
    """Returns each row minus its mean.

    Shape: x [..., D]; result the same.
    """
    return x - x.mean(-1, keepdim=True)


@torch.no_grad()
def centre(model: Transformer, stream: Stream) -> None:
    """Takes the mean out of all that writes into a stream."""
    for name in dict.fromkeys(stream.writers):
        values = model.get_parameter(name)
        projection = name.removesuffix(".weight")
        if projection == name:  # a table, whose rows are written
            values.copy_(centred(values))
            continue
        values.copy_(centred(values.mT).mT)
        if isinstance(bias := model.get_submodule(projection).bias, Tensor):
            bias.copy_(centred(bias))
