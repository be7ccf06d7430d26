"""How many steps an optimizer and a scheduler count, against those that were applied."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from normscale.errors import BadInput
from normscale.monitor.losses import StepProbe
from normscale.monitor.pieces import local
from normscale.probes.probe import Array, Hand, Reading


class Difference:
    """Compares somebody's count of steps with those that were applied since they were met.

    One that was used or loaded before has steps of its own to begin with: only a later change of the difference is
    told, and once. Another one begins anew.
    """

    def __init__(self) -> None:
        self.who: Any = None
        self._before: float | None = None  # steps of its own
        self._told = False

    def meet(self, who: Any) -> bool:
        """Takes the one to come; returns whether it is another."""
        if who is self.who:
            return False
        self.who, self._before, self._told = who, None, False
        return True

    def since(self, count: float | None, applied: int, measured: bool) -> float | None:
        """Returns what would be counted had it begun with this run; None where that is not to be compared."""
        if count is None:
            return None
        if self._before is None:
            self._before = count - applied
        count -= self._before
        if not measured or (count != applied and self._told):
            return None
        self._told = count != applied or self._told
        return count


class OptimizerCount(StepProbe):
    """Compares an optimizer's own count of steps with those that were applied.

    It is that of one parameter, the first: steps in which that had no gradient are no steps to the optimizer, and are
    added to the count. One that lies on a GPU, as of a fused optimizer, travels with the numbers of a measured step.
    """

    name = "counts"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.optimizer: Any = None
        self._difference = Difference()
        self._last: float | None = None  # its count after the last step
        self._far: float | None = None  # of one that lies on a GPU, as it has come to the host
        self._with = False  # whether the parameter has a gradient in the step at hand
        self._met = False  # whether it ever had one: those of an engine's own optimizer are not seen
        self._without = self._applied = 0  # steps that were applied since, and it had none; all that were

    def check(self, optimizer: Any, scaled: bool) -> None:
        """Takes the optimizer of the step to come.

        Raises:
            BadInput: there is a loss scale, and the loop has made the step itself: it would be unscaled and made twice.
        """
        self._meet(optimizer)
        count = optimizer_steps(optimizer)
        if scaled and count is not None and self._last is not None and count > self._last:
            raise BadInput(
                f"monitor.step: the optimizer counts {count:.0f} steps, and {self._last:.0f} after the last one here; "
                "leave scaler.step and scaler.update to the monitor"
            )
        self._with = getattr(_first(optimizer), "grad", None) is not None

    def since(self, optimizer: Any, applied: int, measured: bool) -> float | None:
        """Returns what the optimizer would count had it begun with this run; None where that is not to be compared.

        Called after every step, before numbers are handed over; a count that lies on a GPU is `received` later.
        """
        self._meet(optimizer)
        self._last = optimizer_steps(optimizer)
        self._met |= self._with
        self._without += self._met and not self._with and applied > self._applied
        self._applied = applied
        return self._difference.since(None if self._last is None else self._last + self._without, applied, measured)

    def received(self, optimizer: Any, applied: int) -> float | None:
        """Returns the same of a count that has come from a GPU, after so many steps of this optimizer."""
        far, self._far = self._far, None
        return self._difference.since(far, applied, measured=True) if optimizer is self.optimizer else None

    def hand_over(self) -> Mapping[str, Hand]:
        step = step_of(self.optimizer)
        if isinstance(step, Tensor) and not near(step):
            count = local(step).detach().reshape(1).to(self.device, torch.float64) + self._without
            return {"steps": Hand(count, "first")}
        return {"steps": Hand(torch.full((1,), torch.nan, dtype=torch.float64, device=self.device), "first")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        count = float(values["steps"][0])
        self._far = None if math.isnan(count) else count
        return Reading()

    def _meet(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        if self._difference.meet(optimizer):
            self._last, self._met, self._without = None, False, 0


def optimizer_steps(optimizer: Any) -> float | None:
    """Returns how many steps an optimizer counts, where it says so without waiting for a device."""
    step = step_of(optimizer)
    return None if step is None or (isinstance(step, Tensor) and not near(step)) else float(step)


def near(step: Tensor) -> bool:
    """Returns whether the host can read a count without waiting for a device."""
    return step.device.type == "cpu"


def step_of(optimizer: Any) -> Any:
    """Returns an optimizer's count of steps as it keeps it; None where it keeps none."""
    first, state = _first(optimizer), getattr(optimizer, "state", None)
    return state.get(first, {}).get("step") if isinstance(state, Mapping) else None


def _first(optimizer: Any) -> Any:
    """Returns the first parameter of an optimizer; None where it shows none."""
    groups = getattr(optimizer, "param_groups", None)
    return groups[0]["params"][0] if groups and groups[0]["params"] else None


def scheduler_steps(scheduler: Any, world: int) -> float | None:
    """Returns how many steps of the optimizer a scheduler has followed; None where it does not say.

    One that Accelerate has prepared makes a step of its own for each process (its `split_batches` says otherwise).
    """
    own = getattr(scheduler, "scheduler", scheduler)
    steps = getattr(own, "last_epoch", None)
    if not isinstance(steps, int):
        return None
    joined = own is not scheduler and getattr(scheduler, "step_with_optimizer", False) and not scheduler.split_batches
    return steps / world if joined else steps
