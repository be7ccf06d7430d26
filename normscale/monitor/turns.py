"""How far each block turns the stream, and how much it adds to it: of its input and its output, seen by hooks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normscale.monitor.gathered import Gathered, rows_of
from normscale.monitor.hooks import Hook, HookedProbe
from normscale.monitor.outputs import main_tensor
from normscale.ops.sampled import SAMPLES, angles
from normscale.probes.probe import Array, Hand, Reading

ANGLES, COUNT, BRANCH, STREAM = range(4)


class BlockTurns(HookedProbe):
    """The angle between what a block is given and what it puts out, and the RMS of the difference over the output's.

    The first is that of `probes.angles`, the second what `probes.activations` has of a site: a block's branch is all
    that it adds. Both are of sampled positions (`ops.sampled`), averaged over positions, micro-batches and ranks, the
    second over squares. A block's stream is the first tensor among what it is given and the first that it puts out;
    where these have not one shape [..., D] of two or three dimensions, as those of convolutions, its rows are NaN. What
    a block is given is looked at before it runs, since it may work in place.

    Shape: now, sums [n, 4] fp64: sum of angles, positions, squares of branch and stream.
    """

    name = "turns"
    now: Tensor
    sums: Tensor

    def __init__(self, blocks: Mapping[str, nn.Module], device: torch.device) -> None:
        super().__init__()
        self.count, self.device = len(blocks), device
        self.given: dict[int, tuple[torch.Size, Tensor]] = {}  # shape and rows of the input of blocks that run now
        self.gathered = Gathered(self._work)
        before, after = self.safely(self._before), self.safely(self._after)
        for index, block in enumerate(blocks.values()):
            self._handles += [
                block.register_forward_pre_hook(Hook(self, before, index), with_kwargs=True),
                block.register_forward_hook(Hook(self, after, index)),
            ]
        self.begin(0)

    def begin(self, step: int) -> None:
        self.failed = None
        self.sums = torch.zeros(self.count, 4, dtype=torch.float64, device=self.device)
        self.now = torch.zeros_like(self.sums)

    def drop(self) -> None:
        super().drop()
        self._forget()

    def after_micro_batch(self, positions: Mapping[str, int]) -> None:
        self.shut()
        self.gathered.flush()
        self.sums += self.now
        self._forget()

    def hand_over(self) -> Mapping[str, Hand]:
        return {"sums": Hand(self.sums, "sum")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        turned, count, branch, stream = values["sums"].reshape(self.count, 4).T
        if not count.any():
            return Reading()
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio, angle = np.sqrt(branch / stream), turned / count
        known = ratio[np.isfinite(ratio)]
        scalars = {"branch_p50": float(np.median(known))} if known.size else {}
        return Reading(scalars, {"branch_ratio": ratio, "angle_online": angle})

    def _before(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        x = main_tensor(args)
        x = main_tensor(kwargs) if x is None else x
        if x is not None and x.dim() in (2, 3) and x.numel():
            self.given[index] = x.shape, rows_of(x, SAMPLES)

    def _after(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        y = main_tensor(output)
        shape, rows = self.given.pop(index, (None, None))
        if y is not None and rows is not None and y.shape == shape:
            self.gathered.add(index, None, (rows, rows_of(y, SAMPLES).to(rows.device)))

    def _work(self, indices: Sequence[int], common: Any, tensors: Sequence[Tensor]) -> None:
        given, out = tensors  # [blocks, rows, D]
        turned = angles(given, out)
        sums = [
            turned.nansum(-1),
            (~turned.isnan()).sum(-1).double(),
            (out - given).square().sum((-2, -1)),
            out.square().sum((-2, -1)),
        ]
        for index, row in zip(indices, torch.stack(sums, dim=-1).to(self.now.device), strict=True):
            self.now[index] += row  # a tensor of the indices would make a device wait for the host

    def _forget(self) -> None:
        self.given.clear()
        self.gathered.clear()
        self.now.zero_()
