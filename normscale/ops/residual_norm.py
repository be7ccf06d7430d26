"""The norm of a scaled residual and a branch: the Post-Norm family's."""

import torch
from torch import Tensor

from normscale.errors import BadInput
from normscale.ops.backends import choose
from normscale.ops.norm import normalise
from normscale.ops.philox import drop
from normscale.ops.spec import NormSpec, check_shapes
from normscale.ops.statistics import Statistics


def residual_norm(
    residual: Tensor,
    x: Tensor,
    alpha: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    *,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    backend: str = "eager",
    statistics: Statistics | None = None,
) -> Tensor:
    """Returns y = Norm(alpha * residual + drop(x)), in the wider dtype of residual and x.

    The sum is formed in fp32 at least and not rounded before it is normalised; z of the statistics is this sum.
    `alpha` is a tensor, so that one compiled graph serves every depth. What is dropped is a function of seed and
    position (see `ops.philox`), the same with every backend.

    Shape: residual, x [..., D]; alpha 0-d or [D]; gamma, bias [D] or None; seed 0-d int64; result [..., D].

    Raises:
        BadInput: shapes, dtypes or devices do not fit, or dropout is no probability or has no seed.
        BackendError: `backend` names one that cannot run it.

    Reference: Wang et al. 2022, arXiv:2203.00555, Eq. 1 and Figure 2.
    """
    check(residual, x, alpha, gamma, bias, dropout, seed, statistics)
    if backend != "eager":
        backend = choose(backend, "residual_norm", spec, x, gamma, bias, residual)
    if backend == "triton":
        from normscale.ops import fused

        return fused.residual_norm(residual, x, alpha, gamma, bias, spec, dropout, seed, statistics)
    dtype = torch.promote_types(residual.dtype, x.dtype)
    work = torch.promote_types(dtype, torch.float32)
    z = torch.addcmul(drop(x.to(work), dropout, seed), residual.to(work), alpha.to(work))
    if statistics is not None:
        z = statistics.watch(z)
        statistics.write(z, None)  # each as soon as it is made: it is in the cache then
    y = normalise(z, gamma, bias, spec).to(dtype)
    if statistics is not None:
        statistics.write(None, y)
    return y


def check(
    residual: Tensor,
    x: Tensor,
    alpha: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None,
    dropout: float,
    seed: Tensor | None,
    statistics: Statistics | None,
    next_alpha: Tensor | None = None,
) -> None:
    """Raises BadInput where operands, dropout or statistics do not fit."""
    check_shapes("residual_norm", x, gamma, bias, residual, alpha, next_alpha)
    if not 0.0 <= dropout <= 1.0:
        raise BadInput(f"residual_norm: dropout={dropout!r} is not a probability")
    if dropout and (seed is None or seed.dtype is not torch.int64 or seed.dim() != 0):
        raise BadInput("residual_norm: dropout needs a seed, a 0-d int64 tensor")
    if dropout and seed is not None and seed.device != x.device:
        raise BadInput(f"residual_norm: seed is on {seed.device} and x on {x.device}; move one of them")
    if statistics is not None:
        statistics.check("residual_norm", x)
