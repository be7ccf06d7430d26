"""What is known of the first value of a step that was not finite: the culprit."""

import dataclasses
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from normscale.probes.walk import Counts, Kind

Phase = Literal["data", "parameter", "forward", "loss", "backward", "reduction", "norm", "unknown"]

LOSS = "(loss)"
"""In place of a module's name: what its caller computes outside the model."""

MOST_PROPAGATORS = 20

_SAID: dict[Phase, str] = {
    "data": "in what the model was given",
    "parameter": "there before the step",
    "forward": "on the way forward",
    "loss": "in the loss",
    "backward": "on the way back",
    "reduction": "in the sum over micro-batches or ranks",
    "norm": "in the norm of finite gradients",
    "unknown": "in an unknown place",
}


@dataclass(frozen=True)
class Culprit:
    """The first value that was not finite, and the module that made it.

    Attributes:
        micro_batch: in the window, from 0; -1 where it belongs to none, as in a sum over them.
        phase: where the step stood.
        module: qualified name in the model; "" is the model itself, "(loss)" what its caller computes.
        type: class of the module.
        tensor: which tensor: "output", "output[1]", "output.h", "input[0]" (of the model), "input[0] of 'proj'" (made
            by the module's own code for its child), "weight", "gradient of output of 'proj'", "gradient of input[0]",
            "gradient of weight".
        kind: the gravest kind in it.
        nan, pos_inf, neg_inf: numbers of entries of each kind.
        of: entries of the tensor, 0 where unknown.
        order: place among the events of the micro-batch, forward before backward.
        rank, host, device: where.
        reproduced: whether a replay showed it; otherwise rows or gradients alone tell.
        note: "" or one sentence.
        propagators: modules that handed it on, in order.
        beside: where the module's own code is to blame, the child whose input or output shows it; None elsewhere.
    """

    micro_batch: int
    phase: Phase
    module: str
    type: str
    tensor: str
    kind: Kind
    nan: int
    pos_inf: int
    neg_inf: int
    of: int
    order: int
    rank: int
    host: str
    device: str
    reproduced: bool = True
    note: str = ""
    propagators: tuple[str, ...] = ()
    beside: str | None = None

    @classmethod
    def found(
        cls,
        phase: Phase,
        counts: Counts,
        *,
        module: str,
        type: str,
        tensor: str,
        device: object,
        micro_batch: int = -1,
        order: int = 0,
        reproduced: bool = True,
        note: str = "",
        beside: str | None = None,
    ) -> "Culprit":
        """Returns a culprit on this rank."""
        return cls(
            micro_batch=micro_batch,
            phase=phase,
            module=module,
            type=type,
            tensor=tensor,
            **_counts(counts),
            order=order,
            rank=own_rank(),
            host=socket.gethostname(),
            device=str(device),
            reproduced=reproduced,
            note=note,
            beside=beside,
        )

    @classmethod
    def norm_overflow(cls, entries: int, device: object, model: str = "") -> "Culprit":
        """Returns the culprit of a gradient norm that overflowed though all `entries` of the gradient are finite."""
        return cls.found(
            "norm",
            Counts(0, 1, 0, 1),
            module="",
            type=model,
            tensor="gradient norm",
            device=device,
            reproduced=False,
            note=f"each of the {entries} entries of the gradient is finite, the sum of their squares is not",
        )

    def with_counts(self, counts: Counts) -> "Culprit":
        """Returns the same with what is not finite in another tensor."""
        return dataclasses.replace(self, **_counts(counts))

    def noted(self, note: str) -> "Culprit":
        """Returns the same with one note more."""
        return dataclasses.replace(self, note=f"{self.note}; {note}".removeprefix("; "))

    def fields(self) -> dict[str, Any]:
        """Returns the same as JSON can hold it."""
        return dataclasses.asdict(self) | {"propagators": list(self.propagators)}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Culprit":
        """Returns the culprit that `fields` tells of; what it says beyond that is left out."""
        known = {field.name: fields[field.name] for field in dataclasses.fields(cls) if field.name in fields}
        return cls(**known | {"propagators": tuple(known.get("propagators", ()))})

    def where(self) -> str:
        """Returns the module as a person reads it."""
        if self.module == LOSS:
            return "the loss, outside the model"
        return f"{self.module} ({self.type})" if self.module else f"the model itself ({self.type})"

    def sentence(self) -> str:
        """Returns all that matters in one line."""
        bad = self.nan + self.pos_inf + self.neg_inf
        entries = f" ({bad} of {self.of} entries)" if self.of else ""
        said = f"{self.kind} in {self.tensor}{entries}, {_SAID[self.phase]}: {self.where()}"
        said += f", micro-batch {self.micro_batch} (from 0)" if self.micro_batch >= 0 else ""
        said += f", rank {self.rank} on {self.host} ({self.device})"
        return f"{said}; {self.note}" if self.note else said


def _counts(counts: Counts) -> dict[str, Any]:
    return {"kind": counts.kind, **dataclasses.asdict(counts)}


def own_rank() -> int:
    """Returns the rank of this process, 0 where there is one alone."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    word = os.environ.get("RANK", "0")
    return int(word) if word.isdigit() else 0
