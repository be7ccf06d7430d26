"""What the norms of a model would run on, before it is built."""

import torch

from normscale.config.precision import PrecisionConfig
from normscale.models.plan import Plan
from normscale.ops.backends import described, joined, would_run
from normscale.ops.products import FORMATS

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def norm_backend(plan: Plan, precision: PrecisionConfig, device: str) -> str:
    """Returns what the norms run on, on a kind of device, as a run's record says it.

    Raises:
        BackendError: `model.backend` names one that cannot run one of the norms.
    """
    config = plan.config
    stream, params = _DTYPES[precision.stream], _DTYPES[precision.params]
    rounded = precision.compute in FORMATS and not (precision.compute == "fp16" and device == "cuda")
    inside = torch.float32 if rounded else _DTYPES[precision.compute]
    found: set[str] = set()
    for norm, is_inside in plan.norms_in_use():
        norm, dtype = norm.to(params), inside if is_inside else stream
        run = would_run(config.backend, "norm", norm.spec, norm.width, dtype, device, norm.gamma, norm.bias)
        found.add(described(*run))
    return joined(found)
