"""The contract of a probe, what it may look at, and how its numbers reach the host.

A probe keeps its numbers on the device. When a step is measured it hands over tensors, each with the way ranks combine
it; all of them travel in at most two collectives (one sum, one maximum) and one transfer to the host, and come back to
the probe as numpy arrays. Sums of squares are handed over, not roots: only sums and maxima can be combined.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Reduction = Literal["sum", "max", "first"]


@dataclass(frozen=True)
class Subject:
    """What a probe may look at.

    Attributes:
        sites: name of every site, in the order they run.
        streams: number of tensors the scheme's stream is made of.
        width: D, the width of the stream.
        device: where the model is.
        features: inputs of the model by name -> output of the stack [B, T, D], without gradient, dropout or other side
            effects.
        gradient_squares: () -> sum of squares of the reduced gradient of each sublayer's parameters [sites].
        last_out_square: () -> the same of the output matrix of the last feed-forward sublayer, a 0-d tensor.
        streams_between: inputs -> for each side, the first stream before its first block and after every one.
        loss: inputs, targets and a block to pass over (None: none) -> held-out loss per target, a 0-d tensor.

    The last three may be None, where no probe asks for them.
    """

    sites: Sequence[str]
    streams: int
    width: int
    device: torch.device
    features: Callable[[Mapping[str, Tensor]], Tensor]
    gradient_squares: Callable[[], Tensor]
    last_out_square: Callable[[], Tensor] | None = None
    streams_between: Callable[[Mapping[str, Tensor]], list[list[Tensor]]] | None = None
    loss: Callable[[Mapping[str, Tensor], Tensor, int | None], Tensor] | None = None


class Hand(NamedTuple):
    """A tensor handed over, and how ranks combine it: "first" is the same on every rank already."""

    values: Tensor
    reduction: Reduction


@dataclass
class Reading:
    """What a probe says of one step: scalars by quantity, arrays over depth by profile."""

    scalars: dict[str, float] = field(default_factory=dict)
    profiles: dict[str, Array] = field(default_factory=dict)


class Probe:
    """Base of all probes; every method does nothing.

    A step calls, in this order: `begin`, then `after_micro_batch` for each micro-batch, `after_backward`, `after_step`
    (also when the step was skipped), `hand_over` and `read`. They are called on measured steps only.
    """

    name: ClassVar[str]

    def attach(self, subject: Subject) -> None:
        """Gets ready; called once, before the first step, with the model as it will be trained."""

    def due(self, step: int) -> bool:
        """Tells whether the probe wants `step` (from 1) measured, besides the steps that are measured anyway."""
        return False

    def forward_rows(self) -> Tensor | None:
        """Returns the buffer the model writes the statistics of its streams and branches into, if it is wanted."""
        return None

    def begin(self, step: int) -> None:
        """Called before the first micro-batch of a measured step."""

    def after_micro_batch(self, positions: Mapping[str, int]) -> None:
        """Called after the backward of each micro-batch; `positions` counts those of each side's stream."""

    def after_backward(self) -> None:
        """Called when the gradients are complete and reduced, before clipping."""

    def after_step(self, step: int) -> None:
        """Called after the optimizer step, or in its place when the step was skipped."""

    def hand_over(self) -> Mapping[str, Hand]:
        """Returns the tensors of this step."""
        return {}

    def read(self, values: Mapping[str, Array]) -> Reading:
        """Returns the reading, from what `hand_over` gave, combined over ranks and on the host in fp64."""
        return Reading()

    def state_dict(self) -> dict[str, Any]:
        """Returns what has to survive a restart."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave."""


def collect(
    probes: Sequence[Probe], reduce_sum: Callable[[Tensor], Tensor], reduce_max: Callable[[Tensor], Tensor]
) -> list[Reading]:
    """Returns the reading of every probe: at most two collectives whatever the depth, and one transfer.

    NaN becomes +Inf on its way into a maximum, since gloo's MAX loses a NaN that is not on rank 0; the non-finite
    counts, which are sums, keep the truth.
    """
    given = [dict(probe.hand_over()) for probe in probes]
    parts: dict[Reduction, list[Tensor]] = {"sum": [], "max": [], "first": []}
    places: list[dict[str, tuple[Reduction, int, int]]] = [{} for _ in probes]
    lengths = dict.fromkeys(parts, 0)
    for i, hands in enumerate(given):
        for name, (values, reduction) in hands.items():
            flat = values.detach().double().reshape(-1)
            parts[reduction].append(flat)
            places[i][name] = (reduction, lengths[reduction], lengths[reduction] + flat.numel())
            lengths[reduction] += flat.numel()
    joined = {reduction: torch.cat(tensors) for reduction, tensors in parts.items() if tensors}
    if "sum" in joined:
        joined["sum"] = reduce_sum(joined["sum"])
    if "max" in joined:
        joined["max"] = reduce_max(torch.nan_to_num(joined["max"], nan=torch.inf, posinf=torch.inf))
    if not joined:
        return [probe.read({}) for probe in probes]
    host = torch.cat(list(joined.values())).cpu().numpy()
    starts, at = {}, 0
    for reduction, tensor in joined.items():
        starts[reduction], at = at, at + tensor.numel()
    return [
        probe.read({name: host[starts[r] + a : starts[r] + b] for name, (r, a, b) in place.items()})
        for probe, place in zip(probes, places, strict=True)
    ]
