"""LayerNorm and RMSNorm over the last dimension: the definitions.

Rows whose mean square (LayerNorm: variance) overflows fp32, or that hold an Inf, are where the kernels and the
definitions differ on purpose. The kernels give NaN in the whole row, value and gradient, so that such a row is seen.
The definitions do as PyTorch does: 1 / sqrt(inf) is 0, so that RMSNorm gives zeros, and NaN where the Inf stands;
LayerNorm gives NaN or zeros, by where in the row the overflow comes in PyTorch's sum, and NaN for an Inf. No other row
is touched by either.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from normscale.ops import peers
from normscale.ops.backends import choose
from normscale.ops.spec import NormSpec, check_shapes, one_plus
from normscale.ops.statistics import Statistics


def norm(
    x: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    *,
    backend: str = "eager",
    statistics: Statistics | None = None,
) -> Tensor:
    """Returns Norm(x), in the dtype of `x`; z of the statistics is x.

    Shape: x [..., D]; gamma, bias [D] or None; result [..., D].

    Raises:
        BadInput: shapes or devices do not fit.
        BackendError: `backend` names one that cannot run it.
    """
    check_shapes("norm", x, gamma, bias)
    if statistics is not None:
        statistics.check("norm", x)
    if backend != "eager":
        backend = choose(backend, "norm", spec, x, gamma, bias)
    if backend == "triton":
        from normscale.ops import fused

        return fused.norm(x, gamma, bias, spec, statistics)
    if statistics is not None:
        x = statistics.watch(x)
    y = normalise(x, gamma, bias, spec) if backend == "eager" else peers.norm(backend, x, gamma, bias, spec)
    if statistics is not None:
        statistics.write(x, y)
    return y


def normalise(x: Tensor, gamma: Tensor | None, bias: Tensor | None, spec: NormSpec) -> Tensor:
    """Returns the norm that `spec` names, in the dtype of `x`: what every operation here is defined by.

    Shape: x [..., D]; gamma, bias [D] or None; result [..., D].
    """
    if spec.zero_centred and gamma is not None:
        gamma = one_plus(gamma)
    if spec.kind == "layernorm":
        return layernorm(x, gamma, bias, spec.eps)
    y = rmsnorm(x, gamma, spec.eps)
    return y if bias is None else (y + bias).to(x.dtype)


def layernorm(x: Tensor, gamma: Tensor | None, bias: Tensor | None, eps: float | Tensor) -> Tensor:
    """Returns gamma * (x - mean) / sqrt(var + eps) + bias, in the dtype of `x`.

    Statistics are in fp32 at least: a half-precision variance overflows at 256 and loses eps=1e-8 altogether. The
    variance is the population variance; eps stands inside the root.

    `eps` is a float in eager mode, where ATen's fused kernel does the work. A compiled graph takes a 0-d fp32 tensor,
    since a Python number would be built into the graph, and a sweep over eps would be a graph a value.

    Shape: x [..., D]; gamma, bias [D] or None; result [..., D].

    Reference: Ba et al. 2016, arXiv:1607.06450, Eq. 3-4.
    """
    if isinstance(eps, Tensor):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - wide.mean(-1, keepdim=True)
        y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        return _affine(y, gamma, bias).to(x.dtype)
    if x.dtype is torch.float32 or x.dtype is torch.float64:
        return F.layer_norm(x, x.shape[-1:], _like(x, gamma), _like(x, bias), eps)
    return F.layer_norm(x.float(), x.shape[-1:], _float(gamma), _float(bias), eps).to(x.dtype)


def rmsnorm(x: Tensor, gamma: Tensor | None, eps: float | Tensor) -> Tensor:
    """Returns gamma * x / sqrt(mean(x^2) + eps), in the dtype of `x`, with the statistics in fp32 at least.

    Shape: x [..., D]; gamma [D] or None; result [..., D].

    Reference: Zhang and Sennrich 2019, arXiv:1910.07467, Eq. 4. The authors' code adds eps outside the root; here it
    stands inside, as in LayerNorm and in almost every later model.
    """
    if isinstance(eps, Tensor):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return _affine(y, gamma, None).to(x.dtype)
    if x.dtype is torch.float32 or x.dtype is torch.float64:
        return F.rms_norm(x, x.shape[-1:], _like(x, gamma), eps)
    return F.rms_norm(x.float(), x.shape[-1:], _float(gamma), eps).to(x.dtype)


def _float(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.float()


def _like(x: Tensor, weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.to(x.dtype)  # weights kept in bf16 beside an fp32 stream


def _affine(y: Tensor, gamma: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if gamma is None else y * gamma
    return y if bias is None else y + bias
