"""The size of what every block puts out, and of its gradient: rows over depth, filled by hooks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normscale.monitor.blocks import stack_starts
from normscale.monitor.hooks import Hook, HookedProbe, again
from normscale.monitor.outputs import block_statistics, main_tensor
from normscale.probes.gradients import depth_slope
from normscale.probes.headroom import Headroom
from normscale.probes.probe import Array, Hand, Reading
from normscale.probes.sending import sent

NORM, ABSMAX, NONFINITE, SUM = range(4)


class BlockRows(HookedProbe):
    """RMS, largest absolute value, non-finite count and mean of every block's output, and the same of its gradient.

    A forward hook on each block writes a row of one buffer; a hook on the output writes the gradient's row. Both work
    on measured steps only, and a block that activation checkpointing runs again in backward is not counted again. A
    block that runs several times in a micro-batch adds up in its row, and so do micro-batches.

    The slope over depth is that of the last stack, as of a decoder behind an encoder. Headroom is against the largest
    number of each output's own format: branches inside a block, which autocast may compute in a narrower one, are not
    seen.

    Shape: now, sums [2n, ...] fp64: the n blocks' outputs, then their gradients.
    """

    name = "rows"
    now: Tensor
    sums: Tensor
    maxima: Tensor
    first: Tensor
    micro_batch: int
    calls: list[int]
    seen: list[int]
    numel: list[int]

    def __init__(self, blocks: Mapping[str, nn.Module], device: torch.device) -> None:
        super().__init__()
        self.blocks, self.device = list(blocks), device
        self.reentrant = ""  # the block that was seen to run again under re-entrant checkpointing
        self.odd = ""  # class of what a block returned in which no tensor was found
        self.unscaled = 1.0  # factor that makes gradients those of the mean loss: no loss scale, no sum over ranks
        self.largest = np.full(len(blocks), np.inf)  # largest number of the format of each block's output
        self.headroom = Headroom(1.0, len(blocks))
        self.last_stack = stack_starts(self.blocks)[-1]
        self.step = 0
        self._leaves: dict[tuple[int, int], Any] = {}  # hooks on outputs that outlive the graph, by row and tensor
        self._place(device)
        hooks = (Hook(self, self.forward, index) for index in range(len(blocks)))
        self._handles = [block.register_forward_hook(hook) for block, hook in zip(blocks.values(), hooks, strict=True)]

    def begin(self, step: int) -> None:
        self._place(self.device)
        self.step = step
        self.failed = None

    def open(self) -> None:
        self._before = self.seen.copy(), self.numel.copy()
        super().open()

    def drop(self) -> None:
        super().drop()
        self._let_go()
        self.seen, self.numel = self._before
        self._empty()

    def detach(self) -> None:
        super().detach()
        self._let_go()

    def after_micro_batch(self, positions: Mapping[str, int] | None = None) -> None:
        self._let_go()
        self.shut()
        self.sums[:, 0] += self.now[:, NORM].square()
        self.sums[:, 1:] += self.now[:, NONFINITE:]
        torch.maximum(self.maxima, self.now[:, ABSMAX], out=self.maxima)
        bad = (self.now[:, NONFINITE] > 0) & (self.first < 0)
        self.first = torch.where(bad, self.micro_batch, self.first)
        self.micro_batch += 1
        self._empty()

    def hand_over(self) -> Mapping[str, Hand]:
        counts = sent([self.seen, self.numel], self.device)
        sums, maxima = Hand(self.sums, "sum"), Hand(self.maxima, "max")
        step = Hand(sent([self.step], self.device), "first")
        return {"counts": Hand(counts, "sum"), "sums": sums, "maxima": maxima, "step": step}

    def read(self, values: Mapping[str, Array]) -> Reading:
        n = len(self.blocks)
        seen, numel = values["counts"].reshape(2, 2 * n)
        squares, nonfinite, totals = values["sums"].reshape(2 * n, 3).T
        missing = np.where(seen > 0, 0.0, np.nan)  # what was not seen is not zero
        absmax, nonfinite = values["maxima"] + missing, nonfinite + missing
        self.silent[:] = [name for name, times in zip(self.blocks, seen[:n], strict=True) if not times]
        if len(self.silent) == n:
            return Reading()
        with np.errstate(divide="ignore", invalid="ignore"):
            stream = np.sqrt(squares[:n] / numel[:n])
            share = np.abs(totals[:n] / numel[:n]) / stream
        scalars = {"stream_first": stream[0], "stream_last": stream[-1], "stream_max": np.nanmax(absmax[:n])}
        scalars["stream_growth"] = depth_slope(stream[self.last_stack :])
        known = {
            "stream_first": seen[0],
            "stream_last": seen[n - 1],
            "stream_growth": not np.isnan(scalars["stream_growth"]),
        }
        profiles = {
            "stream_rms": stream,
            "stream_absmax": absmax[:n],
            "stream_nonfinite": nonfinite[:n],
            "stream_mean_share": share,
        }
        if seen[n:].any():
            gradients = np.sqrt(squares[n:]) * self.unscaled + missing[n:]
            profiles |= {"stream_grad_norm": gradients, "stream_grad_absmax": absmax[n:] * self.unscaled}
            profiles["stream_grad_nonfinite"] = nonfinite[n:]
        used = absmax[:n] / np.where(np.isfinite(self.largest), self.largest, np.nan)
        room = self.headroom.read(int(values["step"][0]), np.nan_to_num(used, nan=0.0, posinf=np.inf))
        scalars, profiles = scalars | room.scalars, profiles | room.profiles
        return Reading({name: float(value) for name, value in scalars.items() if known.get(name, True)}, profiles)

    def found(self) -> "Found | None":
        """Returns the first row that was not finite on this rank, forward before backward; for an event."""
        n = len(self.blocks)
        first, nonfinite = self.first.tolist(), self.sums[:, 1].tolist()
        total, most = self.sums[:, 2].tolist(), self.maxima.tolist()
        bad = [i for i in range(2 * n) if nonfinite[i] > 0]
        if not bad:
            return None
        at = min(first[i] for i in bad)
        forward = [i for i in bad if i < n and first[i] == at]
        row = forward[0] if forward else max(i for i in bad if first[i] == at)  # backward begins at the last block
        # Of what is infinite, the sum has the sign.
        kind = "NaN" if math.isnan(most[row]) else "-Inf" if total[row] == -math.inf else "+Inf"
        order = row if row < n else 3 * n - 1 - row  # forward first, then backward from the last block on
        return Found(self.blocks[row % n], row >= n, int(at), order, kind, int(nonfinite[row]), self.numel[row])

    def _empty(self) -> None:
        """Empties the rows of a micro-batch."""
        self.now.zero_()
        self.calls = [0] * len(self.calls)

    def _place(self, device: torch.device) -> None:
        """Empties the buffers, on the device."""
        rows = 2 * len(self.blocks)
        self.now = torch.zeros(rows, 4, dtype=torch.float64, device=device)
        self.sums = torch.zeros(rows, 3, dtype=torch.float64, device=device)
        self.maxima = torch.zeros(rows, dtype=torch.float64, device=device)
        self.first = torch.full((rows,), -1, device=device)
        self.micro_batch = 0
        self.calls, self.seen, self.numel = [0] * rows, [0] * rows, [0] * rows
        self._before = self.seen, self.numel
        self.quiet: set[int] = set()  # blocks that ran without building a graph
        self.loud: set[int] = set()  # and those that built one
        self.silent: list[str] = []

    def forward(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        """Measures a block's output; never raises, since it runs amid someone's forward pass."""
        try:
            if again():
                if index in self.quiet and index not in self.loud:
                    self.reentrant = self.reentrant or self.blocks[index]
                return
            x = main_tensor(output)
            if x is None:
                self.odd = type(output).__name__
                return
            if not torch.is_grad_enabled():
                if not module.training:
                    return  # an evaluation between
                self.quiet.add(index)
            else:
                self.loud.add(index)
            self.largest[index] = torch.finfo(x.dtype).max
            self._write(index, x)
            if x.requires_grad:
                self._await(len(self.blocks) + index, x)
        except Exception as error:
            self.on, self.failed = False, error

    def _await(self, row: int, x: Tensor) -> None:
        """Puts a hook on an output, which goes with the graph; from a leaf, as a parameter, it is to be taken off."""
        if x.is_leaf and (row, id(x)) in self._leaves:
            return  # its gradient comes once, as the sum of all uses
        handle = x.register_hook(partial(self._gradient, row))  # type: ignore[no-untyped-call]
        if x.is_leaf:
            self._leaves[row, id(x)] = handle

    def _let_go(self) -> None:
        """Takes the hooks off leaves."""
        for handle in self._leaves.values():
            handle.remove()
        self._leaves.clear()

    def _gradient(self, row: int, gradient: Tensor) -> None:
        """Measures a gradient; returns nothing, since what a tensor's hook returns would replace it."""
        try:
            if self.on and not torch.is_grad_enabled():  # else it is an inner gradient, as of a gradient penalty
                self._write(row, gradient)
        except Exception as error:
            self.on, self.failed = False, error

    def _write(self, row: int, x: Tensor) -> None:
        with torch.no_grad():
            values = block_statistics(x)
            if self.calls[row]:
                before, values = self.now[row], values.to(self.now)
                values = torch.stack(
                    [
                        torch.hypot(before[NORM], values[NORM]),
                        torch.maximum(before[ABSMAX], values[ABSMAX]),
                        before[NONFINITE] + values[NONFINITE],
                        before[SUM] + values[SUM],
                    ]
                )
            self.now[row].copy_(values, non_blocking=True)
        self.calls[row] += 1
        self.seen[row] += 1
        self.numel[row] += x.numel()


@dataclass(frozen=True)
class Found:
    """A row that was not finite."""

    block: str
    backward: bool
    micro_batch: int
    order: int
    kind: str
    nonfinite: int
    numel: int
