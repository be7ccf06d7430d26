"""The contract of a norm function, and the registry of the norms in this folder."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

import torch
from pydantic import model_validator
from torch import Tensor, nn

import normscale.norms as package
from normscale.config.values import Flag, Fp32, Section, conflict, says
from normscale.ops.add_norm import add_norm
from normscale.ops.backends import Backend, choose
from normscale.ops.constants import Constants
from normscale.ops.handles import Handle, Opening, residual_norm_handle
from normscale.ops.norm import norm as fused_norm
from normscale.ops.peers import norm as peer_norm
from normscale.ops.residual import added, scaled_residual
from normscale.ops.residual_norm import residual_norm
from normscale.ops.spec import NormSpec, one_plus
from normscale.ops.statistics import Statistics
from normscale.registry import Registry


class Norm(Constants, ABC):
    """A map over the last dimension that a scheme places in, before or after a branch.

    A norm is built from its width, eps and options alone; where it stands is the scheme's business. `eps` is kept
    twice on purpose: the float for eager kernels, the 0-d fp32 tensor for compiled graphs (see `ops.norm`). The
    tensor is no part of the state dict: it follows from the configuration.

    A norm that the fused operations know names itself by `spec`; `backend` (see `set_backend`) says what it runs on.
    On a CPU the eager definition is called as it is, under "auto" too: an opaque operation would hide it from the
    compiler's fusion. A norm of one file more is its options, its parameters and `eager`. One whose options do not fit
    a width raises a ConfigError with the option for its key.
    """

    name: ClassVar[str]
    has_eps: ClassVar[bool] = True  # False: `model.eps` would do nothing
    remembers: ClassVar[bool] = False
    """Whether passes of training write running statistics, and read those of other ranks; see `seen_before`."""

    class Options(Section):
        """The norm's own options, from `model.norm_options`."""

    eps_tensor: Tensor
    gamma: Tensor | None
    bias: Tensor | None
    spec: NormSpec | None = None  # None: the operations have no form of this norm
    backend: Backend = "auto"

    def __init__(self, width: int, eps: float, options: Any) -> None:
        super().__init__()
        self.width, self.eps, self.options = width, eps, options
        self.register_parameter("gamma", None)
        self.register_parameter("bias", None)
        self.register_buffer("eps_tensor", torch.tensor(eps, dtype=torch.float32), persistent=False)

    @classmethod
    def settled(cls, options: Any, heads: int) -> Any:
        """Returns the options with what follows from the model's number of heads filled in."""
        return options

    @abstractmethod
    def eager(self, x: Tensor) -> Tensor:
        """Returns the norm of `x`, in its dtype: the definition. Statistics are in fp32 at least.

        Shape: x [..., D]; result the same.
        """

    def constants(self) -> tuple[Tensor, Tensor] | None:
        """Returns what evaluation multiplies by and adds, a channel; None where it depends on the input."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        if (self.backend != "auto" or not x.is_cpu) and (backend := self.backend_for(x)) != "eager":
            return self.run(backend, x)
        return self.eager(x)

    def residual(self, residual: Tensor, branch: Tensor, alpha: Tensor, statistics: Statistics | None = None) -> Tensor:
        """Returns Norm(alpha * residual + branch), in one kernel where the backend has one.

        The eager sum is kept in fp32 until it is normalised, as `ops.residual_norm` defines it. It is summed here all
        the same: under the compiler this norm's function takes eps as a tensor, and the definition does not. The
        norms of other packages take the stream's dtype, to which the sum is then rounded. The sum is z of the
        statistics.

        Shape: residual, branch [..., D]; alpha 0-d or [D]; result [..., D].
        """
        backend = "eager"
        if self.backend != "auto" or not branch.is_cpu:
            backend = self.backend_for(branch, residual)
        if backend == "triton" and self.spec is not None:
            return residual_norm(
                residual, branch, alpha, self.gamma, self.bias, self.spec, backend="triton", statistics=statistics
            )
        dtype = torch.promote_types(residual.dtype, branch.dtype)
        wide = backend == "eager" and dtype not in (torch.float32, torch.float64)
        z = scaled_residual(residual.float() if wide else residual, branch, alpha)
        if statistics is not None:
            z = statistics.watch(z)
        y: Tensor = self(z)
        if wide:
            y = y.to(dtype)
        if statistics is not None:
            statistics.write(z, y)
        return y

    def add(self, residual: Tensor, branch: Tensor, statistics: Statistics | None = None) -> tuple[Tensor, ...]:
        """Returns residual + branch and, where one kernel makes both, its norm; z of the statistics is the sum.

        Shape: residual, branch [..., D]; results [..., D].
        """
        backend = "eager"
        if self.backend != "auto" or not branch.is_cpu:
            backend = self.backend_for(branch, residual)
        if backend == "triton" and self.spec is not None:
            return add_norm(residual, branch, self.gamma, self.bias, self.spec, backend="triton", statistics=statistics)
        return (added(residual, branch, statistics),)

    def beside(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns what `add` does of a sum that is there already: `x` and, where norms are fused, its norm.

        Shape: x [..., D]; results [..., D].
        """
        fused = (self.backend != "auto" or not x.is_cpu) and self.backend_for(x) == "triton"
        return (x, self(x)) if fused else (x,)

    def opening(self, alpha: float) -> nn.Module:
        """Returns what a stack of `residual` begins with: see `ops.handles.Opening`. `alpha` is the first site's."""
        return Opening(self.spec, alpha)

    def residual_handle(
        self,
        residual: Tensor,
        handle: Handle,
        branch: Tensor,
        next_alpha: Tensor,
        statistics: Statistics | None = None,
    ) -> tuple[Tensor, Handle]:
        """Returns what `residual` does, and a handle on it for the next site, whose multiplier is `next_alpha`.

        The handle that comes in brings this site's own alpha. Only stacks that run on Triton have handles.

        Shape: residual, branch [..., D]; next_alpha 0-d or [D].
        """
        assert self.spec is not None, "the opening makes handles for fused norms alone"
        return residual_norm_handle(
            residual, handle, branch, next_alpha, self.gamma, self.bias, self.spec, statistics=statistics
        )

    def backend_for(self, x: Tensor, residual: Tensor | None = None) -> str:
        """Returns what runs on `x`, or on its sum with `residual`: "eager" means the norm's own function.

        The most frequent case, "auto" on a CPU, is seen by callers before they call: 2000 norms a step add up.

        Raises:
            BackendError: the backend that was asked for cannot run this norm on this tensor.
        """
        if self.backend == "eager" or (x.is_cpu and self.backend == "auto"):
            return "eager"
        return choose(self.backend, "norm", self.spec, x, self.gamma, self.bias, residual)

    def run(self, backend: str, x: Tensor) -> Tensor:
        """Returns the norm of `x` on a backend that `backend_for` gave, other than "eager"."""
        assert self.spec is not None, "choose gives eager for a norm without a spec"
        if backend == "triton":
            return fused_norm(x, self.gamma, self.bias, self.spec, backend="triton")
        return peer_norm(backend, x, self.gamma, self.bias, self.spec)

    def current_eps(self) -> float | Tensor:
        """Returns eps as the mode at hand wants it: a float in eager mode, a tensor under the compiler."""
        return self.eps_tensor if torch.compiler.is_compiling() else self.eps

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps:g}"


class GainOptions(Section):
    """What a gain of one number a channel can be told."""

    gain: Annotated[
        Flag, says("false: gamma is 1 and not trained", "gains: arXiv:1607.06450; without, in OLMo 1: arXiv:2402.00838")
    ] = True
    gamma_init: Annotated[Fp32, says("where gamma starts, zero-centred or not", "1 in arXiv:1607.06450")] = 1.0
    zero_centred: Annotated[
        Flag,
        says("gamma is 1 + w, and w is what is trained and decayed", "the code of Gemma, arXiv:2403.08295"),
    ] = False

    @model_validator(mode="after")
    def _of_a_gain(self) -> "GainOptions":
        for option in ("zero_centred", "gamma_init"):
            if not self.gain and getattr(self, option) != type(self).model_fields[option].default:
                raise conflict(f"{option} would do nothing with gain=false; remove one of them", option)
        return self


class AffineOptions(GainOptions):
    """What a gain and a bias can be told."""

    bias: Annotated[
        Flag, says("false: the bias is 0 and not trained", "biases: arXiv:1607.06450; without: arXiv:2601.19895")
    ] = True


class AffineNorm(Norm):
    """A norm followed by a gain a channel, and by a bias where its options have one."""

    def __init__(self, width: int, eps: float, options: Any) -> None:
        super().__init__(width, eps, options)
        if options.gain:
            self.gamma = nn.Parameter(torch.full((width,), options.gamma_init - float(options.zero_centred)))
        if getattr(options, "bias", False):
            self.bias = nn.Parameter(torch.zeros(width))

    def gain(self) -> Tensor | None:
        """Returns what the normalised value is multiplied by, a channel, or None for 1."""
        return one_plus(self.gamma) if self.gamma is not None and self.options.zero_centred else self.gamma

    def affine(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns gain * y + bias, rounded once, to `dtype`."""
        gain = self.gain()
        y = y if gain is None else y * gain
        return (y if self.bias is None else y + self.bias).to(dtype)


def wide(x: Tensor) -> Tensor:
    """Returns `x` in fp32 at least: a half-precision sum of squares overflows, and loses a small eps."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def divisor(size: Tensor) -> Tensor:
    """Returns sizes to divide by: 1 for those of zeros, and of rows too small for a normal number.

    Divided by a tiny number zeros would stay zeros, but their gradient would overflow; and where denormal numbers are
    flushed (`precision.flush_denormals`) what is not normal is 0, and 0 / 0 is NaN.

    Shape: size any; result the same.
    """
    return size.masked_fill(size < torch.finfo(size.dtype).tiny, 1.0)


@contextmanager
def seen_before(model: nn.Module) -> Iterator[None]:
    """Has norms that remember leave their statistics as they are: for a pass that checkpointing runs again."""
    fresh = [norm.get_buffer("fresh") for norm in model.modules() if isinstance(norm, Norm) and norm.remembers]
    for flag in fresh:
        flag.fill_(0.0)
    try:
        yield
    finally:
        for flag in fresh:
            flag.fill_(1.0)


def set_backend(model: nn.Module, backend: Backend) -> None:
    """Sets what the norms of a model run on; norms are made with "auto"."""
    for module in model.modules():
        if isinstance(module, Norm | Opening):
            module.backend = backend


NORMS: Registry[Norm] = Registry(package, "norm", "model.norm")
register, norm_names, find_norm = NORMS.register, NORMS.names, NORMS.find
