"""What each block is worth once training has ended: how far it turns the stream, and the held-out loss without it."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from normscale.probes.probe import Array, Hand, Probe, Reading, Subject
from normscale.probes.stopwatch import Stopwatch

MOST_REMOVED = 16  # blocks that are left out in turn, spread over the depth; each costs one pass over the batches

Batch = tuple[Mapping[str, Tensor], Tensor]
"""The model's inputs by name, and the targets [B, T]."""


class Layers(Probe):
    """Angle and removal of each block, after the last step, on held-out batches.

    The angle lies between what a block reads and what it leaves in the (first) stream: arccos of their cosine over pi,
    averaged over all positions, 0 where it only stretches and 1/2 where nothing of it is left. The removal is by how
    much the loss rises when the block is passed over, and NaN for a block that was not tried; one without which the
    loss is not finite has +Inf. Where the loss of the whole model is not finite nothing can be said: all are NaN.

    Reference: Sun et al. 2025 (The Curse of Depth), arXiv:2502.05795, for both.

    Attributes:
        whole: the loss of the whole model per target, a 0-d tensor; NaN until it is measured.
    """

    name = "layers"
    passes = True
    stopwatch: Stopwatch

    def __init__(self, batches: Sequence[Batch], step: int, most: int = MOST_REMOVED) -> None:
        """Takes the batches, the step after which it is measured, and the number of blocks to leave out."""
        self.batches, self.step, self.most = batches, step, most
        self.stopwatch = Stopwatch()
        self.hands: dict[str, Hand] = {}
        self.whole = torch.full((), torch.nan, dtype=torch.float64)

    def attach(self, subject: Subject) -> None:
        assert subject.streams_between is not None
        assert subject.loss is not None
        self.streams_between, self.loss, self.device = subject.streams_between, subject.loss, subject.device
        self.batches = [
            ({name: value.to(subject.device) for name, value in inputs.items()}, targets.to(subject.device))
            for inputs, targets in self.batches
        ]

    def due(self, step: int) -> bool:
        return step == self.step

    def begin(self, step: int) -> None:
        self.hands = {}

    def after_step(self, step: int) -> None:
        if not self.due(step):
            return
        with self.stopwatch.timing(self.device):
            angles = torch.stack([self._angles(inputs) for inputs, _ in self.batches]).mean(dim=0)
            removal = torch.full_like(angles, torch.nan)
            self.whole = self._loss(None)
            for block in spread_over(len(angles), self.most):
                without = self._loss(block)
                removal[block] = torch.where(without.isfinite(), without - self.whole, torch.inf)
            removal.masked_fill_(~self.whole.isfinite(), torch.nan)
        self.hands = {"angle": Hand(angles, "first"), "removal": Hand(removal, "first")}

    def hand_over(self) -> Mapping[str, Hand]:
        return self.hands

    def read(self, values: Mapping[str, Array]) -> Reading:
        self.stopwatch.settle()
        return Reading(profiles=dict(values))

    def _angles(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns the angle of every block, in half turns.

        Shape: result [blocks] fp64.
        """
        angles = []
        for between in self.streams_between(inputs):
            for before, after in pairwise(between):
                x_BTD, y_BTD = before.double(), after.double()
                norms_BT = torch.linalg.vector_norm(x_BTD, dim=-1) * torch.linalg.vector_norm(y_BTD, dim=-1)
                cosine_BT = (x_BTD * y_BTD).sum(dim=-1) / norms_BT
                angles.append(torch.arccos(cosine_BT.clamp(-1, 1)).mean() / torch.pi)
        return torch.stack(angles)

    def _loss(self, skip: int | None) -> Tensor:
        """Returns the loss per target of all batches, a 0-d fp64 tensor: their numbers of targets may differ."""
        found = [self.loss(inputs, targets, skip) for inputs, targets in self.batches]
        sums, counts = (torch.stack(parts).double().sum() for parts in zip(*found, strict=True))
        return sums / counts


def spread_over(n: int, most: int) -> list[int]:
    """Returns at most `most` of the numbers below n, evenly spread, the first and the last among them."""
    if n <= most:
        return list(range(n))
    if most == 1:
        return [0]
    return [round(i * (n - 1) / (most - 1)) for i in range(most)]
