"""The model update: how far training has moved the function, on a fixed batch."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from normscale.probes.probe import Array, Hand, Probe, Reading, Subject, due_every
from normscale.probes.stopwatch import Stopwatch


class ModelUpdate(Probe):
    """The norm of F(x, theta_t) - F(x, theta_0), averaged over the tokens of a fixed batch.

    The batch x is the model's inputs by name; F is the output of the stack, before the head; theta_0 are the parameters
    the run began with, of which its output alone is kept. It is measured at `steps` and, with an interval `every`, at
    its multiples and the last step. A measurement costs a forward pass over the batch.

    Reference: Wang et al. 2022, arXiv:2203.00555, section 3.
    """

    name = "update"
    passes = True
    stopwatch: Stopwatch

    def __init__(self, inputs: Mapping[str, Tensor], steps: Sequence[int], every: int = 0, last: int = 0) -> None:
        self.inputs, self.steps, self.every, self.last = inputs, frozenset(steps), every, last
        self.stopwatch = Stopwatch()
        self.origin: Tensor | None = None
        self.norm: Tensor | None = None

    def attach(self, subject: Subject) -> None:
        self.features, self.device = subject.features, subject.device
        self.inputs = {name: value.to(subject.device) for name, value in self.inputs.items()}
        if self.origin is None:
            with self.stopwatch.timing(self.device):
                self.origin = self.features(self.inputs)
        self.origin = self.origin.to(subject.device)

    def due(self, step: int) -> bool:
        return step in self.steps or due_every(step, self.every, self.last)

    def begin(self, step: int) -> None:
        self.norm = None

    def after_step(self, step: int) -> None:
        if self.due(step) and self.origin is not None:
            with self.stopwatch.timing(self.device):
                moved = (self.features(self.inputs) - self.origin).double()
                self.norm = torch.linalg.vector_norm(moved, dim=-1).mean()

    def hand_over(self) -> Mapping[str, Hand]:
        return {} if self.norm is None else {"norm": Hand(self.norm, "first")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        self.stopwatch.settle()
        return Reading({"update": float(values["norm"][0])}) if "norm" in values else Reading()

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.origin is None else {"origin": self.origin}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        origin = state.get("origin")
        if origin is not None and self.origin is not None:  # attached already: where the model is
            origin = origin.to(self.origin.device)
        self.origin = origin
