"""One block: its sublayers in order, each joined to the streams by the scheme."""

from collections.abc import Iterator, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscale.models.attention import Context
from normscale.ops.statistics import write_row
from normscale.schemes.scheme import Own, Scheme, Site, Streams


class Sublayer(nn.Module):
    """A branch (attention or feed-forward) and what the scheme owns at its site.

    With `rows` given, the statistics of the branch and of every stream after the join are written there: row
    site * (1 + streams) is the branch, the next ones the streams. Without it nothing is computed.
    """

    rows_of_site: Tensor

    def __init__(self, scheme: Scheme, site: Site, own: Own, branch: nn.Module, dropout: float, streams: int) -> None:
        super().__init__()
        self.scheme, self.site, self.dropout = scheme, site, dropout
        self.own, self.branch = own, branch
        first = site.index * (1 + streams)
        self.register_buffer("rows_of_site", torch.arange(first, first + 1 + streams), persistent=False)

    def forward(self, streams: Streams, context: Context, rows: Tensor | None) -> Streams:
        out = self.branch(self.scheme.read(streams, self.own), context)
        if self.dropout:
            out = F.dropout(out, self.dropout, self.training)
        if torch.promote_types(out.dtype, streams[0].dtype) is not streams[0].dtype:
            out = out.to(streams[0].dtype)  # a wider branch would widen the stream
        if rows is None:
            return self.scheme.write(streams, out, self.own)
        write_row(rows, self.rows_of_site[:1], out)
        return self.scheme.write_measured(streams, out, self.own, rows, self.rows_of_site[1:])


class Block(nn.Module):
    """Self-attention, cross-attention where there is an encoder beside, then feed-forward.

    Shape: streams, each [B, T, D]; result the same.
    """

    def __init__(self, sublayers: Mapping[str, Sublayer]) -> None:
        super().__init__()
        self.sublayers = nn.ModuleDict(dict(sublayers))

    def forward(self, streams: Streams, context: Context, rows: Tensor | None) -> Streams:
        for sublayer in self.sublayers.values():
            streams = sublayer(streams, context, rows)
        return streams

    def __iter__(self) -> Iterator[Sublayer]:
        return (cast(Sublayer, sublayer) for sublayer in self.sublayers.values())

    def structure(self) -> str:
        """Returns a text that two blocks share exactly when one compiled graph serves both.

        It holds module types and options, and shapes of parameters and constants, but no value and no position.
        """
        modules = [f"{name}:{type(module).__name__}({module.extra_repr()})" for name, module in self.named_modules()]
        tensors = [f"{name}{tuple(t.shape)}" for name, t in (*self.named_parameters(), *self.named_buffers())]
        return ";".join(modules + tensors)
