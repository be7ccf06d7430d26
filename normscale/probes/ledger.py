"""The step ledger: whether each attempted step was applied and why not, and whether all who count steps agree.

It takes what an engine says, ours or another's; what engines say where they have nothing to say (-1, None, Inf, the
number of the step before) is resolved by `resolved_norm`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from normscale.probes.probe import Array, Hand, Parameters, Probe, Reading, Reduction, Span
from normscale.probes.sending import Fetched

Reason = Literal["non-finite loss", "non-finite gradient", "norm overflow", "loss scale overflow"]

SAMPLE = 16_384  # parameters that are compared before and after a step
MOST_PENDING = 1000  # steps that wait to be written


def resolved_norm(raw: Any, applied: bool, previous: Any = None) -> float | None:
    """Returns the norm an engine gives of a step's gradient: not finite where that was not, None where it is not known.

    `raw` is what the engine says of this step and `previous` what it said of the step before. Engines say -1 for a
    gradient that was not finite (DeepSpeed, older), +Inf for any step that they skipped (0.19), keep the number of the
    step before (later ones, and each after its gradients were thrown away), or have None. A number as before is
    believed of a step that was applied.
    """
    if raw is None or isinstance(raw, bool | str):
        return None
    norm = float(raw)
    if norm < 0:
        return math.nan
    stale = not applied and previous is not None and not isinstance(previous, bool | str) and norm == float(previous)
    return None if stale and math.isfinite(norm) else norm


def reason_of(loss: float, finite_entries: Callable[[], bool], absorbed: bool = False) -> Reason:
    """Returns why a step was not applied whose loss or gradient norm is not finite.

    `absorbed` says that it was put down to the loss scale; `finite_entries` looks whether all entries of the gradient
    are finite, and is asked only where that decides.
    """
    if absorbed:
        return "loss scale overflow"
    if not math.isfinite(loss):
        return "non-finite loss"
    return "norm overflow" if finite_entries() else "non-finite gradient"


@dataclass(frozen=True)
class Entry:
    """One attempted step: `reason` is None where it was applied; a norm or scale that is not known is None."""

    step: int
    reason: str | None
    lr: float | None
    norm: float | None
    norm_clipped: float | None
    scale_before: float | None = None
    scale_after: float | None = None

    @property
    def applied(self) -> bool:
        return self.reason is None


@dataclass(frozen=True)
class Tally:
    """What is known after a measured step of who has counted and done what; None: not known.

    Attributes:
        applied: steps that were applied, by the trainer's count.
        optimizer: steps by the optimizer's own count.
        lr: the learning rate in the optimizer.
        lr_due: what the schedule gives for the last applied step.
        changed: share of the (sampled) parameters that are not what they were before the step.
        scheduler: steps that a scheduler has followed before this one.
    """

    applied: int
    optimizer: float | None = None
    lr: float | None = None
    lr_due: float | None = None
    changed: float | None = None
    scheduler: float | None = None


def disagreements(entry: Entry, counts: Tally) -> list[str]:
    """Returns a sentence for everything that does not agree about a step; empty where all does."""
    said = []
    if counts.optimizer is not None and counts.optimizer != counts.applied:
        said.append(f"the optimizer counts {counts.optimizer:.0f} steps, {counts.applied} were applied")
    if counts.lr is not None and counts.lr_due is not None and not math.isclose(counts.lr, counts.lr_due, rel_tol=1e-6):
        said.append(
            f"the learning rate is {counts.lr:.6g}, the schedule has {counts.lr_due:.6g} for applied step "
            f"{counts.applied}"
        )
    before = counts.applied - entry.applied
    if counts.scheduler is not None and counts.scheduler != before:
        said.append(f"the scheduler counts {counts.scheduler:g} steps, {before} were applied before this one")
    if counts.changed is not None and not entry.applied and counts.changed > 0:
        said.append(f"the step was not applied ({entry.reason}), but {counts.changed:.2%} of the parameters changed")
    moves = entry.lr != 0 and entry.norm not in (None, 0)
    if counts.changed is not None and entry.applied and moves and counts.changed == 0:
        said.append("the step was applied, but no parameter changed (an update below their rounding changes nothing)")
    return said


class Ledger(Probe):
    """Takes in every attempted step, and on measured ones looks whether parameters, optimizer and schedule agree.

    Whether parameters changed is seen on at most SAMPLE of them, evenly spread. `in_a_row` counts the steps since the
    last applied one; when they reach `stalled` there is one event of that name.
    """

    name = "ledger"

    def __init__(
        self,
        stalled: int,
        lr_due: Callable[[int], float] | None = None,
        parameters: Parameters | None = None,
        combined: Reduction = "first",
    ) -> None:
        """Takes the learning rate by applied step, the parameters, and how ranks combine what is summed over them."""
        self.stalled, self.lr_due, self.parameters, self.combined = stalled, lr_due, parameters, combined
        self.sample = None
        if parameters is not None:
            self.sample = spread_over_entries(parameters.spans, SAMPLE).to(parameters.device)
        self.in_a_row = self.applied = 0
        self.reasons: list[str] = []  # of the steps in a row, at most `stalled`
        self.pending: list[Entry] = []
        self.last: Entry | None = None
        self._late: dict[str, Fetched] = {}  # what of the last row is still on its way to the host, by field
        self.optimizer: torch.optim.Optimizer | None = None
        self.before: Tensor | None = None
        self.changed: Tensor | None = None

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def add(self, entry: Entry, late: Mapping[str, Fetched | None] | None = None) -> list[tuple[str, dict[str, Any]]]:
        """Takes in an attempted step; returns the events it makes, each with its fields.

        `late` are fields of the entry that are still on their way: the row is complete when the next step, which the
        host has waited for, is added.
        """
        self.complete()
        self.last = entry
        self._late = {field: value for field, value in (late or {}).items() if value is not None}
        self.pending.append(entry)
        if entry.applied:
            self.applied += 1
            self.in_a_row, self.reasons = 0, []
            return []
        self.in_a_row += 1
        if self.in_a_row <= self.stalled:
            self.reasons.append(str(entry.reason))
        if self.in_a_row != self.stalled:
            return []
        return [("stalled", {"in_a_row": self.in_a_row, "reasons": in_runs(self.reasons)})]

    def complete(self) -> None:
        """Completes the last row; it waits if something of it has not come yet."""
        late, self._late = self._late, {}
        if late and self.pending:
            came: dict[str, Any] = {field: float(value.arrived()) for field, value in late.items()}
            self.pending[-1] = replace(self.pending[-1], **came)

    def flush(self, at_least: int = 1) -> list[dict[str, Any]]:
        """Returns the complete rows that were not given yet, and forgets them; none if fewer than `at_least` wait."""
        if len(self.pending) < at_least:
            return []
        complete = len(self.pending) - bool(self._late)
        rows, self.pending = [asdict(entry) for entry in self.pending[:complete]], self.pending[complete:]
        return rows

    def begin(self, step: int) -> None:
        self.before = self._sampled()
        self.changed = None

    def after_step(self, step: int) -> None:
        after = self._sampled()
        if after is not None and self.before is not None:
            moved = (after != self.before).double()
            self.changed = torch.stack([moved.sum(), moved.new_full((), len(moved))])
            self.before = None

    def hand_over(self) -> Mapping[str, Hand]:
        hands = {}
        if self.changed is not None:
            hands["changed"] = Hand(self.changed, self.combined)
        if self.optimizer is not None:
            hands["steps"] = Hand(self._optimizer_steps(self.optimizer), "first")
        return hands

    def read(self, values: Mapping[str, Array]) -> Reading:
        found = {name: float(array[0] / array[1] if name == "changed" else array[0]) for name, array in values.items()}
        scalars = {"changed": found["changed"]} if "changed" in found else {}
        if self.last is None:
            return Reading(scalars)
        steps = found.get("steps", math.nan)
        lr = None if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])
        counts = Tally(
            self.applied,
            None if math.isnan(steps) else steps,
            lr,
            self.lr_due(self.applied) if self.lr_due is not None and self.last.applied else None,
            found.get("changed"),
        )
        known = {name: value for name, value in asdict(counts).items() if value is not None}
        events = [("ledger", {"says": "; ".join(said), **known})] if (said := disagreements(self.last, counts)) else []
        return Reading(scalars, events=events)

    def state_dict(self) -> dict[str, Any]:
        return {
            "in_a_row": self.in_a_row,
            "applied": self.applied,
            "reasons": list(self.reasons),
            "pending": [asdict(entry) for entry in self.pending],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.in_a_row, self.applied = int(state["in_a_row"]), int(state["applied"])
        self.reasons = list(state["reasons"])
        self.pending = [Entry(**row) for row in state["pending"]]

    def _sampled(self) -> Tensor | None:
        return None if self.parameters is None else self.parameters.values()[self.sample]

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Returns how many steps the optimizer counts, NaN where it counts none; 0-d, where the parameters are."""
        device = torch.device("cpu") if self.parameters is None else self.parameters.device
        states = [optimizer.state.get(group["params"][0], {}) for group in optimizer.param_groups[:1]]
        if states and "step" in states[0]:
            return torch.as_tensor(states[0]["step"], dtype=torch.float64).to(device, non_blocking=True)
        return torch.full((), torch.nan, dtype=torch.float64, device=device)


def in_runs(reasons: list[str]) -> str:
    """Returns reasons in order, with how often each came in a row: "norm overflow x2, non-finite loss"."""
    runs = [(reason, len(list(same))) for reason, same in groupby(reasons)]
    return ", ".join(reason + (f" x{times}" if times > 1 else "") for reason, times in runs)


def spread_over_entries(spans: Sequence[Span], most: int) -> Tensor:
    """Returns the places of at most `most` entries of the parameters, evenly spread; padding is not among them.

    Shape: result [n] int64.
    """
    starts = torch.tensor([start for start, _ in spans])
    sizes = torch.tensor([stop - start for start, stop in spans])
    ends = sizes.cumsum(0)
    total = int(ends[-1])
    places = torch.arange(min(total, most)) * total // max(1, min(total, most))
    owner = torch.searchsorted(ends, places, right=True)
    return starts[owner] + places - (ends[owner] - sizes[owner])
