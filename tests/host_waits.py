"""How often a host waits for a device: counted on CUDA, and on a CPU as if its tensors lay on a device.

On CUDA torch itself says when it waits (`device_waits`). A CPU never does: there `Apart` counts the calls from Python
that would wait, on the paths that a device takes. It does not see what an operation does within itself.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

HOST, APART = torch.device("cpu"), torch.device("xpu")  # nothing is ever put there; fused optimizers know the name

DEVICE, IS_CPU = Tensor.device.__get__, Tensor.is_cpu.__get__  # type: ignore[attr-defined]
READS = {
    *(getattr(Tensor, name) for name in ("item", "tolist", "cpu", "nonzero", "masked_select", "equal", "unique")),
    *(getattr(Tensor, f"__{name}__") for name in ("float", "int", "bool", "index", "array")),
    *(torch.nonzero, torch.masked_select, torch.equal, torch.unique),
}  # fmt: skip
NUMBERS = {torch.tensor, torch.as_tensor, Tensor.new_tensor}  # made of Python's, on the host first
MADE = {*NUMBERS, torch.zeros, torch.ones, torch.full, torch.empty, torch.arange, torch.rand, torch.randn}


def device_waits(step: Callable[[], object]) -> int:
    """Returns how often a step makes the host wait for the GPU, as torch warns of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


class Apart(TorchFunctionMode):
    """Runs a step as if tensors lay on a device, but for those made on the host in it, and counts what would wait.

    `waits` are the names of such calls: those that bring values to the host, and copies from the host to the device
    that are not said to be `non_blocking`; `total` is how many there ever were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.total = 0
        self._host: Any = WeakIdKeyDictionary()  # the tensors that are on the host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*_tensors([args, kwargs])]
        here = [tensor for tensor in given if tensor in self._host]
        if func == DEVICE:
            return HOST if here else APART
        if func == IS_CPU:
            return bool(here)
        asked = next((one for one in [*args, *kwargs.values()] if isinstance(one, torch.device)), None)
        by_itself = len(here) == len(given) and (bool(here) or func in MADE)
        stays = asked == HOST if asked else func is Tensor.cpu or by_itself
        numbers = func in NUMBERS and not isinstance(args[func is Tensor.new_tensor], Tensor)
        if (numbers and not stays) or (not kwargs.get("non_blocking") and self._waits(func, given, here, stays)):
            self.waits.append(getattr(func, "__name__", str(func)))
            self.total += 1
        found = func(*map(_possible, args), **{key: _possible(value) for key, value in kwargs.items()})
        if func is Tensor.to and stays != bool(here):  # torch has returned the tensor itself
            found = found.clone()
        if stays:
            self._host.update(dict.fromkeys(_tensors([found]), True))
        return found

    def moved(self) -> None:
        """Says that what lies on the host by now was brought to the device, as `model.to(device)` does."""
        self._host.clear()

    def brought(self, tensors: Iterable[Tensor]) -> None:
        """Says that these lie on the host."""
        for tensor in tensors:
            self._host[tensor] = True

    @staticmethod
    def _waits(func: Any, given: list[Tensor], here: list[Tensor], stays: bool) -> bool:
        if func in READS or (stays and len(here) < len(given)):
            return len(here) < len(given)
        writes = func in (Tensor.copy_, Tensor.__setitem__, Tensor.to)
        return not stays and any(writes or tensor.dim() for tensor in here)  # one of no dimension goes as a number


def _possible(argument: Any) -> Any:
    return HOST if isinstance(argument, torch.device) and argument == APART else argument


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
