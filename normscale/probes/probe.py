"""The contract of a probe, what it may look at, and how its numbers reach the host.

A probe keeps its numbers on the device. When a step is measured it hands over tensors, each with the way ranks combine
it; all of them travel in at most two collectives (one sum, one maximum) and one copy to the host, and come back to the
probe as numpy arrays. From a GPU they come while the next step is made, so that the host never waits for them. Sums of
squares are handed over, not roots: only sums and maxima can be combined.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscale.norms import Norm
from normscale.probes.sending import Fetched
from normscale.probes.stopwatch import Stopwatch

Array = NDArray[np.float64]
Reduction = Literal["sum", "max", "first"]
Span = tuple[int, int]

SeeNorm = Callable[[str, Norm, Tensor], None]
"""Called with the name of a norm, the norm, and its input [..., D]."""


@dataclass(frozen=True)
class Parameters:
    """The parameters that this rank holds, as one flat buffer.

    Attributes:
        values: () -> all of them, as they are [total]; within and between places there may be padding, which stays
            zero.
        device: where they are.
        sites: (start, stop) of the places of each site's sublayer's parameters: those before `split`, and those after.
        split: where the optimizer's second tensor begins (it has two: matrices, then vectors).
        held: entries of each site, without padding.
        spans: (start, stop) of the entries of every parameter, ends of the model included; they may be empty.
    """

    values: Callable[[], Tensor]
    device: torch.device
    sites: Sequence[tuple[Sequence[Span], Sequence[Span]]]
    split: int
    held: Sequence[int]
    spans: Sequence[Span]


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
        loss: inputs, targets and a block to pass over (None: none) -> held-out loss summed over the targets, and
            their number, 0-d tensors.
        see_norms: inputs, and what is called with every norm's input, in the order norms run: eagerly, in evaluation
            mode and without gradients, whatever training runs on.
        parameters: what is trained.
        combined: how ranks combine what is summed over parameters or their gradients: "sum" where each holds a part.
        sums: whether every site has a sum z = alpha * residual + branch of its own (see `ops.statistics.Buffers`).
        largest: the largest number of what products are computed in, which branches are.
        largest_stream: the largest number that the stream may hold: of its own format, and of the products' where
            branches read it as it is and not through a norm.
        largest_sum: the largest number of the format that sums are made in before they are normed.

    All from `last_out_square` to `parameters` may be None, where no probe asks for them.
    """

    sites: Sequence[str]
    streams: int
    width: int
    device: torch.device
    features: Callable[[Mapping[str, Tensor]], Tensor]
    gradient_squares: Callable[[], Tensor]
    last_out_square: Callable[[], Tensor] | None = None
    streams_between: Callable[[Mapping[str, Tensor]], list[list[Tensor]]] | None = None
    loss: Callable[[Mapping[str, Tensor], Tensor, int | None], tuple[Tensor, Tensor]] | None = None
    see_norms: Callable[[Mapping[str, Tensor], SeeNorm], None] | None = None
    parameters: Parameters | None = None
    combined: Reduction = "first"
    sums: bool = False
    largest: float = torch.finfo(torch.float32).max
    largest_stream: float = torch.finfo(torch.float32).max
    largest_sum: float = torch.finfo(torch.float32).max

    @property
    def rows_per_site(self) -> int:
        """Rows of a site: its branch, its streams, and z where there is one."""
        return 1 + self.streams + self.sums


class Hand(NamedTuple):
    """A tensor handed over, and how ranks combine it: "first" is the same on every rank already."""

    values: Tensor
    reduction: Reduction


@dataclass
class Reading:
    """What a probe says of one step: scalars by quantity, arrays over depth by profile, events with their fields."""

    scalars: dict[str, float] = field(default_factory=dict)
    profiles: dict[str, Array] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


class Probe:
    """Base of all probes; every method does nothing.

    A step calls, in this order: `begin`, `scaled_by`, then `after_forward` and `after_micro_batch` for each
    micro-batch, `after_backward`, `after_step` (also when the step was skipped), `hand_over` and `read`. They are
    called on measured steps only. `read` may come later, when the backward pass of the next step is done: what it
    needs of the step is handed over with the rest.

    What raises an exception in any of them switches its probe off for the rest of the run (see `probes.guard`). So
    that a probe which fails on one rank alone holds up no other: `due` is a function of the step, and what
    `hand_over` hands over has names, shapes and reductions that depend on nothing but whether the step was due.

    A probe that makes passes of its own times them with a `stopwatch`: they are no part of a training step. It says
    with `passes` that it makes some in `attach`, or in `after_step` of steps that it is due on, and nowhere else:
    ranks may have to make them together (see `probes.joint`).
    """

    name: ClassVar[str]
    passes: ClassVar[bool] = False
    stopwatch: Stopwatch | None = None

    def attach(self, subject: Subject) -> None:
        """Gets ready; called once, before the first step, with the model as it will be trained."""

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Learns of the optimizer that will make the steps; called once, after `attach`."""

    def due(self, step: int) -> bool:
        """Tells whether the probe wants `step` (from 1) measured, besides the steps that are measured anyway."""
        return False

    def buffers(self) -> Mapping[str, Tensor]:
        """Returns the tensors a model fills on measured steps, by their field of `ops.statistics.Buffers`."""
        return {}

    def begin(self, step: int) -> None:
        """Called before the first micro-batch of a measured step."""

    def scaled_by(self, factor: float) -> None:
        """Learns by what the gradients that flow through the model on this step are larger than the loss's own.

        The loss is the mean over the targets of the global batch; engines average gradients over ranks, so that each
        rank's loss is multiplied by their number, and by the loss scale where there is one.
        """

    def after_forward(self, logits_BTV: Tensor, targets_BT: Tensor) -> None:
        """Called after the forward of each micro-batch, with what the head says, detached, and with the targets."""

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
        """Returns the reading, from what `hand_over` gave alone, combined over ranks and on the host in fp64."""
        return Reading()

    def state_dict(self) -> dict[str, Any]:
        """Returns what has to survive a restart."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave."""


def due_every(step: int, every: int, last: int) -> bool:
    """Tells whether a probe of its own interval is due: every `every` steps and at the last; 0 is never."""
    return every > 0 and (step % every == 0 or step == last)


def collect(
    probes: Sequence[Probe], reduce_sum: Callable[[Tensor], Tensor], reduce_max: Callable[[Tensor], Tensor]
) -> list[Reading]:
    """Returns the reading of every probe: at most two collectives whatever the depth, and one transfer."""
    found = Transfer([probe.hand_over() for probe in probes], reduce_sum, reduce_max).arrays()
    return [probe.read(values) for probe, values in zip(probes, found, strict=True)]


class Transfer:
    """What was handed over, combined over ranks and on its way to the host: at most two collectives and one copy.

    NaN becomes +Inf on its way into a maximum, since gloo's MAX loses a NaN that is not on rank 0; the non-finite
    counts, which are sums, keep the truth.

    `ready` says that the numbers can be had without waiting.
    """

    def __init__(
        self,
        given: Sequence[Mapping[str, Hand]],
        reduce_sum: Callable[[Tensor], Tensor],
        reduce_max: Callable[[Tensor], Tensor],
    ) -> None:
        parts: dict[Reduction, list[Tensor]] = {"sum": [], "max": [], "first": []}
        lengths = dict.fromkeys(parts, 0)
        self._places: list[dict[str, tuple[Reduction, int, int]]] = [{} for _ in given]
        for places, hands in zip(self._places, given, strict=True):
            for name, (values, reduction) in hands.items():
                flat = values.detach().double().reshape(-1)
                parts[reduction].append(flat)
                places[name] = (reduction, lengths[reduction], lengths[reduction] + flat.numel())
                lengths[reduction] += flat.numel()
        joined = {reduction: torch.cat(tensors) for reduction, tensors in parts.items() if tensors}
        if "sum" in joined:
            joined["sum"] = reduce_sum(joined["sum"])
        if "max" in joined:
            joined["max"] = reduce_max(
                torch.nan_to_num(joined["max"], nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
            )
        self._starts, at = {}, 0
        for reduction, tensor in joined.items():
            self._starts[reduction], at = at, at + tensor.numel()
        self._fetched = Fetched(torch.cat([*joined.values()])) if joined else None

    @property
    def ready(self) -> bool:
        return self._fetched is None or self._fetched.ready

    def arrays(self) -> list[dict[str, Array]]:
        """Returns of each that has handed over its arrays [n] by name."""
        if self._fetched is None:
            return [{} for _ in self._places]
        host, starts = self._fetched.arrived().numpy(), self._starts
        return [
            {name: host[starts[r] + a : starts[r] + b] for name, (r, a, b) in places.items()} for places in self._places
        ]
