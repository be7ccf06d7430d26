"""Norms of other projects, where they are installed: what `backend=liger` and `backend=apex` run.

Each is called so that it means what our definition means: fp32 inside, eps inside the root, gradients not written over
the incoming one. `backends` says what each is not offered for. Neither has a residual sum with a multiplier, so that
in a Post-Norm stack the sum stays eager. Both launch on the current device, hence the guard.
"""

from typing import Any

import torch
from torch import Tensor

from normscale.ops.spec import NormSpec, one_plus


def norm(backend: str, x: Tensor, gamma: Tensor | None, bias: Tensor | None, spec: NormSpec) -> Tensor:
    """Returns the norm of `x` as `ops.norm.norm` defines it, computed by the package `backend`.

    Shape: x [..., D]; gamma, bias [D]; result [..., D].
    """
    assert gamma is not None, "offered for norms with a gain only"
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        y: Tensor = (_liger if backend == "liger" else _apex)(x, gamma, bias, spec)
        return y


def _liger(x: Tensor, gamma: Tensor, bias: Tensor | None, spec: NormSpec) -> Any:
    """Liger's kernels; tried with liger-kernel 0.8.5. They take any strides, by copying.

    Some earlier versions keep LayerNorm's mean and deviation in the dtype of `x`, which costs gradients in bf16.
    """
    if spec.kind == "layernorm":
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return LigerLayerNormFunction.apply(x, one_plus(gamma) if spec.zero_centred else gamma, bias, spec.eps)
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # "gemma" is its name for fp32 from load to store; in_place would write dx over a dy that others may still need.
    return LigerRMSNormFunction.apply(x, gamma, spec.eps, float(spec.zero_centred), "gemma", False)


def _apex(x: Tensor, gamma: Tensor, bias: Tensor | None, spec: NormSpec) -> Any:
    """apex's FusedLayerNorm and FusedRMSNorm, called as its documentation has it (not tried with a build of it).

    Outside autocast, which would round their input.
    """
    from apex.normalization import fused_layer_norm as apex

    with torch.autocast("cuda", enabled=False):
        if spec.kind == "layernorm":
            return apex.fused_layer_norm_affine(x, gamma, bias, x.shape[-1:], spec.eps)
        return apex.fused_rms_norm_affine(x, gamma, x.shape[-1:], spec.eps)
