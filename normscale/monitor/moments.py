"""Where Adam's epsilon takes over from the gradient's own size, in a block of anyone's model."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from normscale.monitor.losses import StepProbe
from normscale.monitor.samples import Samples
from normscale.probes.adam import entries_of, reading_of
from normscale.probes.probe import Array, Hand, Reading
from normscale.probes.sending import sent

_ADAM = (torch.optim.Adam, torch.optim.AdamW)  # the second is one of the first in newer versions of torch alone


class AdamMoments(StepProbe):
    """`AdamEpsilon` of each block's parameters, over entries spread evenly over each of them.

    It reads the state that torch.optim.Adam or AdamW has of each parameter, or of this rank's piece of it. Where an
    engine keeps that to itself (DeepSpeed's ZeRO), or the optimizer is another one, there are no such numbers, and
    `unseen` says why.
    """

    name = "adam"

    def __init__(self, parameters: Callable[[], Sequence[Sequence[Tensor]]], blocks: int, device: torch.device) -> None:
        """Takes what gives the parameters of every block, as they are on the step at hand."""
        self.parameters, self.blocks, self.device = parameters, blocks, device
        self.optimizer: Any = None  # of the step, out of what may be around it
        self.hidden = False  # whether that is of an engine of DeepSpeed
        self.unseen = ""  # why there was no state to be seen on the last measured step, if so
        self._samples: Samples | None = None
        self._of: list[Tensor] = []
        self.begin(0)

    def begin(self, step: int) -> None:
        self.sums = torch.zeros(self.blocks, 4, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        self.unseen = ""
        if not isinstance(self.optimizer, _ADAM):
            own = f"the optimizer is {type(self.optimizer).__name__}, and not torch's Adam or AdamW"
            self.unseen = "the engine keeps the state of its optimizer to itself" if self.hidden else own
            return
        settings = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        state = self.optimizer.state
        groups = [[p for p in own if id(p) in settings and state.get(p)] for own in self.parameters()]
        flat = [p for own in groups for p in own]
        if not flat:
            return  # no step was applied yet
        first, second = [state[p]["exp_avg"] for p in flat], [_second(state[p], settings[id(p)]) for p in flat]
        take = self._sampled(groups, flat, second)
        edges = _edges([(state[p]["step"], settings[id(p)]) for p in flat], self.device)
        below, made, whole = entries_of(take(first), take(second), take.spread(edges))
        found = (below, made, whole, torch.ones_like(whole))
        self.sums = torch.stack([take.sums(each) for each in found], dim=1)

    def hand_over(self) -> Mapping[str, Hand]:
        return {"sums": Hand(self.sums, "sum")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        sums = values["sums"].reshape(self.blocks, 4)
        return reading_of(sums) if sums[:, 3].any() else Reading()

    def _sampled(self, groups: Sequence[Sequence[Tensor]], flat: list[Tensor], second: Sequence[Tensor]) -> Samples:
        """Returns what is taken of the moments: what was, as long as the parameters are the same."""
        same = len(flat) == len(self._of) and all(map(operator.is_, flat, self._of))
        if self._samples is None or not (same and self._samples.fit(second, self.device)):
            moments = iter(second)
            self._samples = Samples([[next(moments) for _ in own] for own in groups], self.device)
            self._of = flat
        return self._samples


def _second(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """Returns the second moment by which Adam divides."""
    second: Tensor = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    return second


def _edges(steps: Sequence[tuple[Any, Mapping[str, Any]]], device: torch.device) -> Tensor:
    """Returns eps in units of the second moment's root as it is kept, without the correction of its bias.

    Takes the steps of each parameter, and its settings; counts of a fused optimizer lie on a GPU, and stay there.

    Shape: result [len(steps)].
    """
    near = [not isinstance(step, Tensor) or step.device.type == "cpu" for step, _ in steps]
    decay = sent([float(group["betas"][1]) for _, group in steps], device)
    eps = sent([float(group["eps"]) for _, group in steps], device)
    if all(near):
        made = sent([float(step) for step, _ in steps], device)
    else:
        made = torch.stack([torch.as_tensor(step, device=device).double() for step, _ in steps])
    return (eps * (1 - decay**made).sqrt()).float()
