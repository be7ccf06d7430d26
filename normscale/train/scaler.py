"""The dynamic loss scale: a power of two on the loss that keeps small gradients representable."""

from dataclasses import dataclass
from typing import Any, Literal

from normscale.config.precision import LARGEST_SCALE, LossScaleConfig

LARGEST = LARGEST_SCALE  # growth ends here: where nothing overflows it would never end


@dataclass(frozen=True)
class Change:
    """A new scale: what it was and is, and why."""

    before: float
    after: float
    reason: Literal["overflow", "growth"]


class LossScale:
    """Halves at a step whose loss or gradient is not finite, doubles after `growth_steps` applied steps in a row.

    A step that is not finite while the scale can still be halved is put down to the scale, wherever it went wrong, and
    training goes on: that is what fp16 training does. At `minimum`, or with a scale that is not dynamic, it is the
    model's. All numbers are powers of two, so that scaling and unscaling change no finite gradient's bits. What it
    does follows from what it was told, so that ranks that are told the same have the same scale.

    Reference: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; the constants are those of PyTorch's GradScaler
    (initial 65536, factor 2, 2000 steps), the largest scale is that of NVIDIA's apex.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self.config = config
        self.value = config.initial
        self.since = 0  # applied steps since the last change or overflow

    def absorbs(self) -> bool:
        """Tells whether a step that is not finite would be put down to the scale."""
        return self.config.dynamic and self.value > self.config.minimum

    def update(self, finite: bool) -> Change | None:
        """Takes what came of one step; returns the change of the scale, if there is one."""
        if not self.config.dynamic:
            return None
        before = self.value
        if not finite:
            self.since = 0
            self.value = max(before / 2, self.config.minimum)
            return Change(before, self.value, "overflow") if self.value != before else None
        self.since += 1
        if self.since < self.config.growth_steps:
            return None
        self.since = 0
        self.value = before if before >= LARGEST else before * 2
        return Change(before, self.value, "growth") if self.value != before else None

    def state_dict(self) -> dict[str, Any]:
        """Returns what has to survive a restart."""
        return {"value": self.value, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.value, self.since = float(state["value"]), int(state["since"])
