"""One block: its sublayers in order, each joined to the streams by the scheme."""

from collections.abc import Iterator, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscale.models.attention import Context
from normscale.ops import sampled
from normscale.ops.statistics import Buffers, write_row
from normscale.schemes.scheme import Own, Scheme, Site, Streams


class Sublayer(nn.Module):
    """A branch (attention or feed-forward) and what the scheme owns at its site.

    With buffers given, what they ask of the branch, of every stream after the join and of z is written there, in rows
    that follow one another (see `ops.statistics.Buffers`). Without them nothing is computed.
    """

    rows_of_site: Tensor

    def __init__(self, scheme: Scheme, site: Site, own: Own, branch: nn.Module, dropout: float, streams: int) -> None:
        super().__init__()
        self.scheme, self.site, self.dropout = scheme, site, dropout
        self.own, self.branch = own, branch
        self.attends = site.kind != "ffn"
        count = 1 + streams + scheme.sums
        first = site.index * count
        self.register_buffer("rows_of_site", torch.arange(first, first + count), persistent=False)

    def forward(self, streams: Streams, context: Context, to: Buffers | None) -> Streams:
        if to is not None and to.attention is not None and self.attends:
            scores = (to.attention, self.rows_of_site[:1])
            context = Context(context.rotary, context.memory_BSD, context.keep_B11S, context.places, scores)
        out = self.branch(self.scheme.read(streams, self.own), context)
        if self.dropout:
            out = F.dropout(out, self.dropout, self.training)
        if torch.promote_types(out.dtype, streams[0].dtype) is not streams[0].dtype:
            out = out.to(streams[0].dtype)  # a wider branch would widen the stream
        if to is None:
            return self.scheme.write(streams, out, self.own)
        write_row(to.rows, self.rows_of_site[:1], out)
        return self.scheme.write_measured(streams, out, self.own, to, self.rows_of_site[1:])


class Block(nn.Module):
    """Self-attention, cross-attention where there is an encoder beside, then feed-forward.

    Shape: streams, each [B, T, D]; result the same.
    """

    row: Tensor

    def __init__(self, sublayers: Mapping[str, Sublayer], row: int) -> None:
        """Takes the row of the samples that this block leaves (see `ops.statistics.Buffers`)."""
        super().__init__()
        self.sublayers = nn.ModuleDict(dict(sublayers))
        self.register_buffer("row", torch.tensor([row]), persistent=False)

    def forward(self, streams: Streams, context: Context, to: Buffers | None) -> Streams:
        for sublayer in self.sublayers.values():
            streams = sublayer(streams, context, to)
        if to is not None and to.samples is not None and context.places is not None:
            sampled.keep(to.samples, self.row, streams[0], context.places)
        return streams

    def __iter__(self) -> Iterator[Sublayer]:
        return (cast(Sublayer, sublayer) for sublayer in self.sublayers.values())

    def structure(self) -> str:
        """Returns a text that two blocks share exactly when one compiled graph serves both.

        It holds module types and options, and shapes of parameters and constants, but no value and no position; and
        the norms that come after its sites, whosoever they are.
        """
        after = ((f"{name}.after", sublayer.own.after) for name, sublayer in zip(self.sublayers, self, strict=True))
        named = [*self.named_modules(), *after]
        modules = [
            f"{name}:{type(module).__name__}({module.extra_repr()})" for name, module in named if module is not None
        ]
        tensors = [f"{name}{tuple(t.shape)}" for name, t in (*self.named_parameters(), *self.named_buffers())]
        return ";".join(modules + tensors)
