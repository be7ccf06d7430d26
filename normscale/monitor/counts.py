"""How many steps an optimizer counts, against those that were applied."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from normscale.errors import BadInput


class OptimizerCount:
    """Compares an optimizer's own count of steps with those that were applied since it was met.

    One that was used or loaded before has steps of its own to begin with: only a later change of the difference is
    told, and once. Another optimizer begins anew.
    """

    def __init__(self) -> None:
        self.optimizer: Any = None
        self._before: float | None = None  # steps of its own
        self._last: float | None = None  # its count after the last step
        self._told = False

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

    def since(self, optimizer: Any, applied: int, measured: bool) -> float | None:
        """Returns what the optimizer would count had it begun with this run; None where that is not to be compared."""
        self._meet(optimizer)
        self._last = optimizer_steps(optimizer)
        if self._last is None:
            return None
        if self._before is None:
            self._before = self._last - applied
        count = self._last - self._before
        if not measured or (count != applied and self._told):
            return None
        self._told = count != applied or self._told
        return count

    def _meet(self, optimizer: Any) -> None:
        if optimizer is not self.optimizer:
            self.optimizer, self._before, self._last, self._told = optimizer, None, None, False


def optimizer_steps(optimizer: Any) -> float | None:
    """Returns how many steps an optimizer counts, where it says so without waiting for a device."""
    groups, state = getattr(optimizer, "param_groups", None), getattr(optimizer, "state", None)
    if not groups or not groups[0]["params"] or not isinstance(state, Mapping):
        return None
    step = state.get(groups[0]["params"][0], {}).get("step")
    if isinstance(step, Tensor):
        return float(step) if step.device.type == "cpu" else None
    return None if step is None else float(step)
