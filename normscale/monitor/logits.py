"""The normaliser of the output softmax of anyone's model, where it is known what its logits are."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normscale.errors import BadInput, nearest
from normscale.monitor.hooks import Hook, HookedProbe
from normscale.monitor.outputs import main_tensor
from normscale.ops.sampled import spread
from normscale.probes.names import plain_name
from normscale.probes.output import OutputSoftmax
from normscale.probes.probe import Array, Reading, Subject

ENTRIES = 2**21  # of the logits of a micro-batch that are looked at: 8 MB in fp32
LEAST = 16  # positions that are looked at, whatever they take


class Logits(HookedProbe, OutputSoftmax):
    """`OutputSoftmax` of what a module puts out, at positions spread over each micro-batch.

    It is the model, whose output then has `logits` as an attribute or a key, or a module that was named. All positions
    count, padding and prompts included: which of them are targets is the loss's business.
    """

    def __init__(self, module: nn.Module, named: bool, inside: bool, device: torch.device) -> None:
        """Takes the module, whether it was named (then its first tensor will do), and whether it is part of a model."""
        super().__init__()
        self.named, self.device = named, device
        self.silent = False  # whether no logits were seen on the last measured step
        self._handles = [module.register_forward_hook(Hook(self, self.safely(self._see), 0, inside=inside))]
        self.begin(0)

    def begin(self, step: int) -> None:
        self.failed = None
        self.waiting: list[Tensor] = []
        self.attach(Subject((), 1, 0, self.device, lambda _: _nothing(), _nothing))
        super().begin(step)

    def drop(self) -> None:
        super().drop()
        self.waiting.clear()

    def after_micro_batch(self, positions: Mapping[str, int]) -> None:
        self.shut()
        for log_z in self.waiting:
            self.add(log_z.to(self.device), torch.ones_like(log_z, dtype=torch.bool, device=self.device))
        self.waiting.clear()

    def read(self, values: Mapping[str, Array]) -> Reading:
        self.silent = not values["sums"][1]
        return Reading() if self.silent else super().read(values)

    def _see(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        if logits is None and self.named:
            logits = main_tensor(output)
        if isinstance(logits, Tensor) and logits.dim() in (2, 3) and logits.numel():
            positions = max(LEAST, ENTRIES // logits.shape[-1])
            # Half precision is widened of the sample alone: of all of it, that may be the step's largest tensor.
            self.waiting.append(spread(logits.detach(), positions, positions).float().logsumexp(-1))


def find_logits(inner: nn.Module, name: str | None) -> nn.Module | None:
    """Returns the module that puts out the logits, by its name; None without one.

    Raises:
        BadInput: the model has no module of that name.
    """
    modules = {plain_name(own): module for own, module in inner.named_modules(remove_duplicate=False)}
    if name is not None and name not in modules:
        hint = nearest(name, list(modules)) or '; "" is the model itself'
        raise BadInput(f"Monitor(logits={name!r}): the model has no such module{hint}")
    return None if name is None else modules[name]


def _nothing() -> Tensor:
    return torch.empty(0)
