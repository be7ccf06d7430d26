"""The events of one pass: tensors with an entry that is not finite, in the order in which they went by.

Not every event is a fault. A tensor that holds -Inf and no other such value may be a mask; and where the loss is finite
after all, any of them may be one that nobody used. These are kept as doubts, for whoever runs the pass to decide by
running another one in which they are mended (see `replay`).
"""

from dataclasses import dataclass

import torch
from torch import nn

from normscale.probes.culprit import LOSS, Culprit, Phase
from normscale.probes.mend import Place
from normscale.probes.walk import Counts

Who = tuple[str, str]
"""A module's name and its class."""

OUTSIDE: Who = (LOSS, "")

Mark = tuple[int, str, str]
"""What tells an event from others, in another pass too: its order, module and tensor."""


def mark_of(event: Culprit) -> Mark:
    return event.order, event.module, event.tensor


@dataclass
class Call:
    """One call of a module; `last` is the child that was called last in it, if any."""

    module: nn.Module
    who: Who
    outer: "Call | None"
    last: str | None = None

    @property
    def name(self) -> str:
        return self.who[0]

    def child(self, name: str | None) -> str:
        """Returns a child's name as it is in this module, in quotes."""
        name = name or ""
        short = name.removeprefix(f"{self.name}.") if self.name else name
        return f"'{short}'"


class Events:
    """What one pass over one micro-batch showed.

    Attributes:
        tick: calls and gradients so far; the order of an event.
        first: the first event that is no doubt.
        doubts: events before it that may be no faults, in order; all on the way forward.
        places: all events on the way forward, and in the micro-batch, by where they can be mended.
        seen: all events, but on the way back only the first.
        trail: the modules that events were seen in, with the order.
    """

    def __init__(self, micro_batch: int) -> None:
        self.micro_batch, self.tick = micro_batch, 0
        self.first: Culprit | None = None
        self.doubts: dict[Place, Culprit] = {}
        self.places: dict[Place, Culprit] = {}
        self.seen: dict[Mark, Culprit] = {}
        self.trail: list[tuple[int, str]] = []

    def add(
        self,
        phase: Phase,
        counts: Counts,
        who: Who,
        tensor: str,
        device: torch.device,
        note: str = "",
        place: Place | None = None,
        beside: str | None = None,
    ) -> None:
        """Takes an event; only what can be mended has a `place`."""
        if self.first is not None and phase == "backward":
            return
        event = Culprit.found(
            phase,
            counts,
            module=who[0],
            type=who[1],
            tensor=tensor,
            device=device,
            micro_batch=self.micro_batch,
            order=self.tick,
            note=note,
            beside=beside,
        )
        self.seen.setdefault(mark_of(event), event)
        if place is not None:
            self.places.setdefault(place, event)
        if self.first is None and place is not None and counts.like_a_mask:
            self.doubts.setdefault(place, event)
        else:
            self.first = self.first or event

    def doubt_all(self) -> None:
        """Makes doubts of all events so far: the loss is finite after all."""
        self.doubts, self.first = dict(self.places), None

    def place_of(self, event: Culprit) -> Place | None:
        """Returns where an event can be mended, None where it cannot."""
        return next((place for place, known in self.places.items() if known is event), None)
