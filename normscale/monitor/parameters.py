"""The parameters of every block: how large their gradient is, and how far a step moves them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normscale.monitor.blocks import Places, stack_starts
from normscale.monitor.engines import on_device, whole
from normscale.monitor.gradients import Shown
from normscale.monitor.losses import StepProbe
from normscale.monitor.pieces import local
from normscale.monitor.samples import Samples
from normscale.probes.gradients import Gradients as SublayerGradients
from normscale.probes.gradients import depth_slope
from normscale.probes.probe import Array, Hand, Reading
from normscale.probes.sending import sent

NOT_SHOWN = "{engine} shows no gradients of parameters here: there are none by block"
NOT_HAD = "the optimizer of this step has no parameter of the blocks that is trained: there are no numbers of them"
NOT_REACHED = "no parameter of the blocks had a gradient in this step: there are none by block"

SAME = 1e-3  # relative difference of two norms that are the same


class BlockParameters(StepProbe):
    """L2 norm of the gradient of each block's parameters before clipping, and how far a step moves them.

    Parameters are those that the optimizer of the step has: others it neither clips nor moves.
    The second is the norm of a block's change over that of the block before, of steps that are applied. Of blocks with
    more than `probes.weights.ENTRIES` entries in all it is an estimate over entries spread evenly over each parameter,
    of which a copy is kept for the time of the step. Where an engine shows no gradients, as DeepSpeed's behind
    Accelerate, there is no such profile, rather than one of zeros. A block that was taken out of the model has NaN.

    A loop that has measured the norm may have clipped by it: then norms are scaled to what they were, and the norm of
    all gradients is recorded as it is, which is after clipping.
    """

    name = "parameters"

    def __init__(self, inner: nn.Module, blocks: Mapping[str, nn.Module], device: torch.device, updates: bool) -> None:
        self.blocks, self.device, self.updates = dict(blocks), device, updates
        self.places, self.last_stack = Places(inner), stack_starts(list(blocks))[-1]
        self.source: Shown | None = None
        self.given: Any = None  # the norm before clipping, of a loop that has measured it
        self.unlike = False  # whether that cannot be the norm of these gradients
        self.optimizer: Any = None  # of the step, out of what may be around it
        self.lacks = ""  # why the last measured step showed no gradient, if it did not; "{engine}" is to be filled in
        self.changed: float | None = None  # share of the blocks that it moved, where that could be seen
        tables = (nn.Embedding, nn.EmbeddingBag)
        self.tables = [any(isinstance(each, tables) for each in block.modules()) for block in blocks.values()]
        self.samples: Samples | None = None
        self.partial = [False] * len(self.blocks)  # of which blocks only a sample was handed over
        self.begin(0)

    def begin(self, step: int) -> None:
        self.sums = torch.zeros(8, len(self.blocks), dtype=torch.float64, device=self.device)
        self.norms = torch.zeros(3, dtype=torch.float64, device=self.device)  # present, squared; given; ranks
        self.own: list[list[Tensor]] = []
        self.before: Tensor | None = None

    @torch.no_grad()
    def after_backward(self) -> None:
        self.own = self.trained()
        if self.source is None:
            return
        has = set(map(id, self.source.parameters))
        self.own = [[p for p in group if id(p) in has] for group in self.own]
        still, shown = self._still(), bool(self.source.present())
        rows = [[bool(group), any(id(p) not in still for p in group), shown] for group in self.own]
        self.sums[5:] = sent(rows, self.device).T
        if self.given is not None:
            present, given = self.source.squares().sum(), on_device(whole(self.given), self.device)
            self.norms = torch.stack([present.to(self.device), given, torch.ones_like(given)])
        place = {id(p): i for i, p in enumerate(self.source.present())}
        groups = [[place[id(p)] for p in group if id(p) in place] for group in self.own]
        self.sums[0] = sent([float(bool(group)) for group in groups], self.device)
        if flat := [i for group in groups for i in group]:
            self.sums[1] = self._by_block(self.source.squares()[sent(flat, self.source.device, torch.int64)], groups)

    @torch.no_grad()
    def before_step(self) -> None:
        flat = [p for group in self.own for p in group]
        if self.updates and flat:
            if self.samples is None or not self.samples.fit(flat, self.device):
                self.samples = Samples(self.own, self.device)
            self.before = self.samples(flat)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        flat = [p for group in self.own for p in group]
        if self.before is None or self.samples is None or not self.samples.fit(flat, self.device):
            return  # gathered or given away meanwhile: nothing to compare
        moved = self.samples(flat).sub_(self.before)
        self.sums[2] = sent([float(any(local(p).numel() for p in group)) for group in self.own], self.device)
        self.sums[3] = self.samples.sums(moved.double().square_())
        self.sums[4] = self.samples.sums(self.before.double().square_())
        self.before = None

    def hand_over(self) -> Mapping[str, Hand]:
        if self.samples is not None:
            self.partial = self.samples.partial
        return {"sums": Hand(self.sums, "sum"), "norms": Hand(self.norms, "sum")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        there, squares, compared, moved, size, had, driven, shown = values["sums"].reshape(8, len(self.blocks))
        present, given, ranks = values["norms"]
        self.lacks, self.unlike = "", False
        if not there.any():
            self.lacks = NOT_SHOWN if not shown.any() else NOT_REACHED if had.any() else NOT_HAD
        pushed = (driven > 0) & (squares != 0) | ~shown.any()  # and so to be moved by the step
        if given > 0 and present > 0:
            factor = float(given / ranks / np.sqrt(present))
            self.unlike = factor < 1 - SAME
            squares = squares * factor**2 if factor > 1 + SAME else squares
            there = np.zeros_like(there) if self.unlike else there
        # Of a table few rows move in a step, and a sample may have none of them: that says nothing.
        unsure = np.array([a and b for a, b in zip(self.partial, self.tables, strict=True)])
        told = (compared > 0) & ((moved > 0) | (~unsure & pushed))
        self.changed = float((moved[told] > 0).mean()) if told.any() else None
        reading = Reading()
        if there.any():
            reading = SublayerGradients().read({"squares": np.where(there > 0, squares, np.nan)})
            slope = depth_slope(np.sqrt(np.where(there > 0, squares, np.nan))[self.last_stack :])
            reading.scalars["grad_slope_now"] = slope
            if not there.all() or math.isnan(slope):
                reading.scalars = {name: value for name, value in reading.scalars.items() if not math.isnan(value)}
        if compared.any():
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where((compared > 0) & (size > 0), np.sqrt(moved / size), np.nan)
            reading.profiles["update_rel"] = ratio
            if np.isfinite(ratio).any():
                ends = {"update_rel_p50": np.nanmedian(ratio), "update_rel_max": np.nanmax(ratio)}
                reading.scalars |= {name: float(value) for name, value in ends.items()}
        if 0 < given < math.inf and math.isfinite(present) and not self.unlike:
            reading.scalars["grad_norm_clipped"] = float(np.sqrt(present))
        return reading

    def _still(self) -> set[int]:
        """Returns the ids of parameters whose learning rate is 0, where the host knows it."""
        groups = getattr(self.optimizer, "param_groups", None) or ()
        zero = (group for group in groups if isinstance(rate := group.get("lr"), int | float) and rate == 0)
        return {id(p) for group in zero for p in group["params"]}

    def trained(self) -> list[list[Tensor]]:
        """Returns the trained parameters of every block as they are now, each in the first block that has it."""
        seen: set[int] = set()
        found = []
        blocks = self.blocks.values()
        for block, gone in zip(blocks, self.places.gone(blocks), strict=True):
            own: list[Tensor] = [p for p in block.parameters() if p.requires_grad and id(p) not in seen and not gone]
            seen.update(map(id, own))
            found.append(own)
        return found

    def _by_block(self, squares: Tensor, groups: Sequence[Sequence[object]]) -> Tensor:
        """Returns the sum over each group of what stands in a row.

        Shape: squares [number of all members]; result [len(groups)] fp64.
        """
        owner = [i for i, group in enumerate(groups) for _ in group]
        sums = torch.zeros(len(groups), dtype=torch.float64, device=self.device)
        return sums.index_add_(0, sent(owner, self.device, torch.int64), squares.to(self.device))
