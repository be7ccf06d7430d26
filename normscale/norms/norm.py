"""The contract of a norm function, and the registry of the norms in this folder."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import normscale.norms as package
from normscale.config.values import Section
from normscale.ops.residual import scaled_residual
from normscale.registry import Registry


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


NORMS: Registry[Norm] = Registry(package, "norm", "model.norm")
register, norm_names, find_norm = NORMS.register, NORMS.names, NORMS.find
