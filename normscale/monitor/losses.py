"""The loss over all ranks, and losses that were not finite on one of them while the gradients were."""

from collections.abc import Mapping

import torch

from normscale.probes.probe import Array, Hand, Probe, Reading
from normscale.probes.sending import sent


class StepProbe(Probe):
    """A probe of a loop that is not ours: it is told, too, when a step is about to be applied.

    `device` is that of the model, which may be moved between steps.
    """

    device: torch.device

    def before_step(self) -> None:
        """Called just before the parameters change, where that can be known."""


class Losses(StepProbe):
    """The mean over ranks of a measured step's loss.

    And how many losses since the last measured step were not finite though the step was applied: under DDP a rank's own
    loss does not decide, where all gradients are finite (as with a mean over no targets that is thrown away).
    """

    name = "losses"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.loss = torch.nan
        self.bad: list[int] = []

    def add(self, step: int, loss: float, unnoticed: bool) -> None:
        """Takes this rank's loss of a step; `unnoticed` says that it was not finite, and the step applied."""
        self.loss = loss
        if unnoticed:
            self.bad.append(step)

    def hand_over(self) -> Mapping[str, Hand]:
        sums = sent([self.loss, 1.0, len(self.bad)], self.device)
        first = sent([-float(self.bad[0]) if self.bad else -torch.inf], self.device)
        self.bad = []
        return {"sums": Hand(sums, "sum"), "first": Hand(first, "max")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        total, ranks, bad = values["sums"]
        reading = Reading({"loss_train": float(total / ranks)})
        if bad:
            said = "a loss was not finite, the gradients were; the steps were applied"
            reading.events.append(
                ("loss_nonfinite", {"count": int(bad), "first_step": int(-values["first"][0]), "says": said})
            )
        return reading
