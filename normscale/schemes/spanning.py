"""What Post-Norm schemes with a skip over the whole block share: the block's input is carried beside the stream."""

from torch import Tensor

from normscale.ops.statistics import Buffers, Statistics, watch, write_sum
from normscale.schemes.scheme import Depth, Make, Own, Parts, Scheme, Site, Streams


class Spanning(Scheme):
    """x' = Norm(residual + F(x)), where the residual of a block's last site may hold what entered the block.

    Inside a block the streams are (x, block input), between blocks (x,): what a block hands on is one tensor.
    """

    sums = True

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        return {"norm": make.norm(), "alpha": 1.0}

    def last_residual(self, x: Tensor, block_input: Tensor) -> Tensor:
        """Returns what the block's last branch is added to.

        Shape: x, block_input, result [B, T, D].
        """
        raise NotImplementedError

    def shown(self, streams: Streams) -> tuple[Tensor, ...]:
        return streams[:1]

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        return self._joined(self._normed(streams, out, own, None), streams, own)

    def write_measured(self, streams: Streams, out: Tensor, own: Own, to: Buffers, index: Tensor) -> Streams:
        """As `Scheme.write_measured`; the fused norm has the numbers of z and of its result."""
        y_row, z_row = index[:1], index[1:]
        y = watch(self._normed(streams, out, own, Statistics(to.rows, z_row, y_row)), to.grad_rows, y_row)
        write_sum(to.sums, y_row, y)
        return self._joined(y, streams, own)

    def _normed(self, streams: Streams, out: Tensor, own: Own, found: Statistics | None) -> Tensor:
        residual = self.last_residual(*streams) if own.kind == "ffn" else streams[0]
        y: Tensor = own.module("norm").residual(residual, out, own.tensor("alpha"), found)
        return y

    def _joined(self, y: Tensor, streams: Streams, own: Own) -> Streams:
        return (y,) if own.kind == "ffn" else (y, streams[-1])
