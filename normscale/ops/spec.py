"""What a norm is, apart from its weights; and the shapes that the operations of this folder accept."""

from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from normscale.errors import BadInput

Kind = Literal["layernorm", "rmsnorm"]

# Triton's square root flushes what lies below: such an eps would be 0 there, and a constant row NaN.
SMALLEST_EPS = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class NormSpec:
    """A norm over the last dimension: its kind, eps inside the root, and whether the gain is 1 + gamma.

    The 1 of a zero-centred gain is added in fp32, since 1 + 0.0039 is 1 in bf16. `eps_tensor` is eps for compiled
    graphs, which have a number of Python's built in: 0-d fp32, on the CPU, where a kernel's launch reads it.

    Raises:
        BadInput: the kind is unknown, or eps is negative, not finite, or below fp32's normal numbers without being 0.
    """

    kind: Kind
    eps: float
    zero_centred: bool = False
    eps_tensor: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in ("layernorm", "rmsnorm"):
            raise BadInput(f"norm: kind {self.kind!r} is neither 'layernorm' nor 'rmsnorm'")
        if not isfinite(self.eps) or self.eps < 0 or 0 < self.eps < SMALLEST_EPS:
            raise BadInput(f"norm: eps={self.eps!r} must be 0 or a finite number from {SMALLEST_EPS:.2g} up")
        object.__setattr__(self, "eps_tensor", torch.tensor(self.eps, dtype=torch.float32, device="cpu"))


def one_plus(gamma: Tensor) -> Tensor:
    """Returns 1 + gamma in fp32 (fp64 stays): the gain of a zero-centred norm."""
    return 1.0 + gamma.to(torch.promote_types(gamma.dtype, torch.float32))


def check_shapes(
    name: str,
    x: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    alpha: Tensor | None = None,
    next_alpha: Tensor | None = None,
) -> None:
    """Raises a BadInput that names the tensor whose shape or type does not fit, instead of broadcasting it."""
    if x.dim() < 1 or x.shape[-1] < 1:
        raise BadInput(f"{name}: x has shape {tuple(x.shape)}; it needs a last dimension of at least 1")
    width = x.shape[-1]
    for what, tensor, allowed in (
        ("residual", residual, (x.shape,)),
        ("gamma", gamma, ((width,),)),
        ("bias", bias, ((width,),)),
        ("alpha", alpha, ((), (width,))),
        ("next_alpha", next_alpha, ((), (width,))),
    ):
        if tensor is None:
            continue
        if tensor.shape not in allowed:
            wanted = " or ".join(str(tuple(shape)) for shape in allowed)
            raise BadInput(f"{name}: {what} has shape {tuple(tensor.shape)}; beside x {tuple(x.shape)} it is {wanted}")
        if tensor.device != x.device:
            raise BadInput(f"{name}: {what} is on {tensor.device} and x on {x.device}; move one of them")
    for what, tensor in (("x", x), ("residual", residual), ("alpha", alpha), ("next_alpha", next_alpha)):
        if tensor is not None and not tensor.is_floating_point():
            raise BadInput(f"{name}: {what} is {tensor.dtype}; a norm takes floating-point tensors")
