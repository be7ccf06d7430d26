"""Norms in int8, simulated: what a machine that keeps the norm's output and gain in 8 bits would compute."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normscale.fold.affine import affine_of
from normscale.models.stack import Transformer
from normscale.norms import Norm

LARGEST = 127


def int8(x: Tensor) -> Tensor:
    """Returns each row rounded to 127 steps to either side of 0, of a size of its own: the largest entry is 127 steps.

    Shape: x [..., D]; result the same.
    """
    step = x.abs().amax(-1, keepdim=True) / LARGEST
    return torch.where(step > 0, (x / torch.where(step > 0, step, 1)).round() * step, x)


class Int8Norms:
    """While `on`, every norm of a model gives int8 numbers, from an int8 gain; while `watched`, errors add up instead.

    Statistics, the product with the gain and the bias stay as they are: they are of registers, not of memory. The norms
    are to run by their definition (`set_backend(model, "eager")`).
    """

    def __init__(self, model: Transformer) -> None:
        self.norms = {name: module for name, module in model.named_modules() if isinstance(module, Norm)}
        self._rounded = {name: _with_int8_gain(norm) for name, norm in self.norms.items()}
        self._sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in self.norms}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Lets the model run on int8 norms in the block."""
        with self._hooked(lambda name, x, y: int8(self._rounded[name](x))):
            yield

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Lets the model run as it is in the block, and adds up what int8 would change at each norm by itself."""

        def compare(name: str, x: Tensor, y: Tensor) -> None:
            apart = int8(self._rounded[name](x)) - y
            for i, part in enumerate((apart, y)):
                self._sums[name][i] += float(part.double().square().sum())

        with self._hooked(compare):
            yield

    def errors(self) -> dict[str, float]:
        """Returns, by norm, the root mean square error of its int8 output over that of the output, as was watched."""
        return {name: (apart / size) ** 0.5 if size else 0.0 for name, (apart, size) in self._sums.items()}

    @contextmanager
    def _hooked(self, call: Any) -> Iterator[None]:
        def hook(name: str) -> Any:
            return lambda module, inputs, output: call(name, inputs[0], output)

        hooks = [norm.register_forward_hook(hook(name)) for name, norm in self.norms.items()]
        try:
            yield
        finally:
            for each in hooks:
                each.remove()


@torch.no_grad()
def _with_int8_gain(norm: Norm) -> Norm:
    gain, _ = affine_of(norm)
    rounded = copy.deepcopy(norm)
    if gain is not None and norm.gamma is not None:
        rounded.gamma = nn.Parameter(norm.gamma + (int8(gain) - gain))
    return rounded
