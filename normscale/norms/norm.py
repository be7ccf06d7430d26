"""The contract of a norm function, and the registry that finds them."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import normscale.norms as package
from normscale.config.schema import Section
from normscale.errors import ConfigError, nearest
from normscale.ops.residual import scaled_residual


class Norm(nn.Module):
    """A map over the last dimension that a scheme places in, before or after a branch.

    A norm is built from its width, eps and options alone; where it stands is the scheme's business. `eps` is kept
    twice on purpose: the float for eager kernels, the 0-d fp32 tensor for compiled graphs (see `ops.norm`). The
    tensor is no part of the state dict: it follows from the configuration.
    """

    name: ClassVar[str]

    class Options(Section):
        """The norm's own options, from `model.norm_options`."""

    eps_tensor: Tensor

    def __init__(self, width: int, eps: float, options: Any) -> None:
        super().__init__()
        self.width, self.eps, self.options = width, eps, options
        self.register_buffer("eps_tensor", torch.tensor(eps, dtype=torch.float32), persistent=False)

    def residual(self, residual: Tensor, branch: Tensor, alpha: Tensor) -> Tensor:
        """Returns Norm(alpha * residual + branch); a norm with a fused form of it overrides this.

        Shape: residual, branch [..., D]; alpha 0-d or [D]; result [..., D].
        """
        out: Tensor = self(scaled_residual(residual, branch, alpha))
        return out

    def current_eps(self) -> float | Tensor:
        """Returns eps as the mode at hand wants it: a float in eager mode, a tensor under the compiler."""
        return self.eps_tensor if torch.compiler.is_compiling() else self.eps

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps:g}"


_NORMS: dict[str, type[Norm]] = {}


def register(name: str) -> Callable[[type[Norm]], type[Norm]]:
    """Returns a class decorator that enters a norm under `name`."""

    def enter(cls: type[Norm]) -> type[Norm]:
        cls.name = name
        _NORMS[name] = cls
        return cls

    return enter


def norm_names() -> list[str]:
    """Returns the names of all norms, sorted."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return sorted(_NORMS)


def find_norm(name: str) -> type[Norm]:
    """Returns the norm class called `name`.

    Raises:
        ConfigError: there is none; the message lists those there are and names the nearest.
    """
    names = norm_names()
    if name not in names:
        raise ConfigError(
            f"model.norm: {name!r} is not a norm{nearest(name, names)} (allowed: {', '.join(names)})", key="model.norm"
        )
    return _NORMS[name]
