"""What the precisions of a configuration come to on a device, and what an engine would not do."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from normscale.config.precision import PrecisionConfig
from normscale.errors import ConfigError
from normscale.ops.products import FORMATS, NATIVE, Native, Products, Rounded

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def products_of(precision: PrecisionConfig, device: str) -> Products:
    """Returns what the network's products are on a kind of device: PyTorch's own, or rounded ones.

    fp16 is native on CUDA alone: a CPU has fp16 products, at a hundredth of the speed. fp8 is rounded everywhere.
    """
    compute = precision.compute
    if compute in FORMATS and not (compute == "fp16" and device == "cuda"):
        return Rounded(FORMATS[compute], precision.softmax)
    narrow = "bf16" in (precision.stream, precision.params)
    if precision.softmax == "fp32" and not (compute == "fp32" and narrow):
        return NATIVE
    return Native(precision.softmax, torch.float32 if compute == "fp32" else None)


def casting(
    precision: PrecisionConfig, products: Products, device: str, cached: bool = True
) -> AbstractContextManager[Any]:
    """Returns the context of a forward pass: products in bf16 or fp16 where asked and where they are native.

    `cached` says whether autocast keeps the narrow copy of each weight to the end of the pass.
    """
    if precision.compute == "fp32" or isinstance(products, Rounded):
        return nullcontext()
    return torch.autocast(device, dtype=DTYPES[precision.compute], cache_enabled=cached)


def check_precision(precision: PrecisionConfig, device: str, world: int) -> None:
    """Refuses what the engine for this kind of device and number of ranks would not do.

    Raises:
        ConfigError: a value that would do nothing here.
    """

    def refuse(name: str, value: str, why: str) -> ConfigError:
        key = f"precision.{name}"
        return ConfigError(f"{key}: {value} would do nothing {why}", key=key)

    if precision.reduce != "fp32" and world == 1:
        mend = "remove it, or start several ranks (python -m launch local --nproc 2)"
        raise refuse("reduce", precision.reduce, f"with one process, which has nothing to reduce; {mend}")
    if precision.tf32 and device != "cuda":
        raise refuse("tf32", "true", f"on {device}, which has no TF32; remove it or run on a CUDA device")
    if precision.flush_denormals and device != "cpu":
        raise refuse("flush_denormals", "true", f"on {device}: it is a flag of the CPU's threads; remove it")


def settle(model: Any, precision: PrecisionConfig, products: Products) -> None:
    """Gives the model its products, the dtype of its stream, and parameters in their dtype (constants stay fp32)."""
    for module in model.modules():
        if hasattr(module, "products"):
            module.products = products
    if isinstance(products, Rounded):
        model.products = products.at_head()
    narrow = "bf16" in (precision.stream, precision.params)
    model.stream = DTYPES[precision.stream] if narrow else None
    if precision.params != "fp32":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPES[precision.params])
