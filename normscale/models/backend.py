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
    cases = {(config.d, stream)}
    if config.qk_norm != "none":
        cases.add((config.d if config.qk_norm == "full" else config.d // config.heads, inside))
    if config.kv_latent is not None:
        cases.add((config.kv_latent, inside))
    with torch.device("meta"):
        norm = plan.norm(1, config.eps, plan.norm_options).to(params)
    found: set[str] = set()
    for width, dtype in sorted(cases, key=str):
        run = would_run(config.backend, "norm", norm.spec, width, dtype, device, norm.gamma, norm.bias)
        found.add(described(*run))
    return joined(found)
