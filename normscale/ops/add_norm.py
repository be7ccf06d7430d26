"""The sum and the norm after it, where the sum is kept: Pre-Norm's."""

import torch
from torch import Tensor

from normscale.ops.backends import choose
from normscale.ops.norm import normalise
from normscale.ops.spec import NormSpec, check_shapes
from normscale.ops.statistics import Statistics


def add_norm(
    residual: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    *,
    backend: str = "eager",
    statistics: Statistics | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns z = residual + x and y = Norm(z), both in the wider dtype of the two.

    The sum is formed in fp32 at least and rounded once, and y is the norm of the rounded sum: the stream that is
    handed on is the one that was normalised, and the backward pass reads it.

    Shape: residual, x [..., D]; gamma, bias [D] or None; results [..., D].

    Raises:
        BadInput: shapes or devices do not fit.
        BackendError: `backend` names one that cannot run it.
    """
    check_shapes("add_norm", x, gamma, bias, residual)
    if statistics is not None:
        statistics.check("add_norm", x)
    if backend != "eager":
        backend = choose(backend, "add_norm", spec, x, gamma, bias, residual)
    if backend == "triton":
        from normscale.ops import fused

        return fused.add_norm(residual, x, gamma, bias, spec, statistics)
    dtype = torch.promote_types(residual.dtype, x.dtype)
    work = torch.promote_types(dtype, torch.float32)
    z = (residual.to(work) + x.to(work)).to(dtype)
    if statistics is not None:
        z = statistics.watch(z)
    y = normalise(z, gamma, bias, spec)
    if statistics is not None:
        statistics.write(z, y)
    return z, y
