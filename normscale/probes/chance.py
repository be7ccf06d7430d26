"""The generators that a model's forward pass may draw from, and their states: what a replay has to begin with."""

import random
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


class Sources(NamedTuple):
    """Generators beside those of Python, numpy and the host: those of CUDA devices, and a model's own."""

    devices: tuple[torch.device, ...] = ()
    own: tuple[torch.Generator, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> "Sources":
        """Returns those of the devices that its parameters and buffers are on, and those its modules have."""
        held = (value for module in model.modules() for value in vars(module).values())
        own = {id(value): value for value in held if isinstance(value, torch.Generator)}
        return cls(_on_cuda(x.device for x in chain(model.parameters(), model.buffers())), tuple(own.values()))

    @classmethod
    def at(cls, device: torch.device) -> "Sources":
        """Returns that of one device."""
        return cls(_on_cuda([device]))


class RandomState(NamedTuple):
    """The states of Python's, numpy's and torch's generators, and of other sources."""

    python: Any
    numpy: Any
    cpu: Tensor
    sources: Sources
    cuda: tuple[Tensor, ...]
    own: tuple[Tensor, ...]

    @classmethod
    def capture(cls, sources: Sources) -> "RandomState":
        """Returns the states as they are; it waits for no device."""
        cuda = tuple(torch.cuda.get_rng_state(device) for device in sources.devices)
        own = tuple(generator.get_state() for generator in sources.own)
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), sources, cuda, own)  # noqa: NPY002

    def restore(self) -> None:
        """Puts the generators back to where they were."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.cpu)
        for device, state in zip(self.sources.devices, self.cuda, strict=True):
            torch.cuda.set_rng_state(state, device)
        for generator, state in zip(self.sources.own, self.own, strict=True):
            generator.set_state(state)


def _on_cuda(devices: Iterable[torch.device]) -> tuple[torch.device, ...]:
    return tuple(dict.fromkeys(device for device in devices if device.type == "cuda"))
