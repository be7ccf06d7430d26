"""Residual sums: residual + branch, and that of the Post-Norm family, alpha * residual + branch."""

import torch
from torch import Tensor

from normscale.ops.statistics import Statistics


def added(residual: Tensor, branch: Tensor, statistics: Statistics | None = None) -> Tensor:
    """Returns z = residual + branch, in the wider dtype of the two.

    Shape: residual, branch [..., D]; result [..., D].
    """
    z = residual + branch
    if statistics is not None:
        z = statistics.watch(z)
        statistics.write(z, None)
    return z


def scaled_residual(residual: Tensor, branch: Tensor, alpha: Tensor) -> Tensor:
    """Returns z = alpha * residual + branch, in the wider dtype of the two.

    The sum is formed in fp32 at least and rounded once. `alpha` is a tensor (0-d, or [D] for one multiplier a
    channel), so that one compiled graph serves every depth. The multiplier belongs to the residual, not to the branch:
    y = LN(alpha * x + F(x)).

    Shape: residual, branch [..., D]; result [..., D].

    Reference: Wang et al. 2022, arXiv:2203.00555, Eq. 1 and Figure 2.
    """
    dtype = torch.promote_types(residual.dtype, branch.dtype)
    work = torch.promote_types(dtype, torch.float32)
    return torch.addcmul(branch.to(work), residual.to(work), alpha.to(work)).to(dtype)
