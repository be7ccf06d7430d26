"""How far each block turns the stream, while training goes on."""

from collections.abc import Mapping

import torch
from torch import Tensor

from normscale.ops.sampled import SAMPLES, turns
from normscale.probes.probe import Array, Hand, Probe, Reading, Subject


class Angles(Probe):
    """The angle between what a block reads and what it leaves in the (first) stream, over pi; rows are blocks.

    It is that of `probes.layers`, but on sampled positions of the training batch (`ops.sampled.places`), dropout
    included, averaged over positions, micro-batches and ranks: cheap enough for every measured step. Blocks leave their
    samples in the buffer; the angles are computed of all at once.

    Reference: Sun et al. 2025 (The Curse of Depth), arXiv:2502.05795.
    """

    name = "angles"

    def attach(self, subject: Subject) -> None:
        blocks = list(dict.fromkeys(site.rpartition(".")[0] for site in subject.sites))
        sides = [block.partition(".")[0] for block in blocks]
        between = (
            sides.count("encoder") if len(set(sides)) > 1 else -1
        )  # no block, but one side's end and the next entry
        rows = len(blocks) + len(set(sides))
        self.own = [i for i in range(rows - 1) if i != between]
        self.samples = torch.zeros(rows, SAMPLES, subject.width, dtype=torch.float32, device=subject.device)
        self.sums = torch.zeros(rows, dtype=torch.float64, device=subject.device)

    def buffers(self) -> Mapping[str, Tensor]:
        return {"samples": self.samples}

    def begin(self, step: int) -> None:
        self.samples.zero_()
        self.sums.zero_()

    def after_micro_batch(self, positions: Mapping[str, int]) -> None:
        self.sums[:-1] += turns(self.samples)
        self.sums[-1] += 1

    def hand_over(self) -> Mapping[str, Hand]:
        return {"sums": Hand(self.sums, "sum")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        return Reading(profiles={"angle_online": values["sums"][self.own] / values["sums"][-1]})
