"""The GPUs that a plan can be made for: memory, link to the other GPUs of a host, peak of their products.

Memory is what PyTorch reports of one (`total_memory`), which is less than the number on the box and in other units.
Links are the published rate in one direction: half of what a data sheet calls NVLink bandwidth. The peaks are those of
`train.flops`.
"""

from dataclasses import dataclass

import torch

from normscale.config.precision import PrecisionConfig
from normscale.errors import BadInput, nearest
from normscale.train.flops import published_peak

GIB = 2**30
RESERVED_GIB = 1.0  # assumed: CUDA's context, NCCL's and cuBLAS's work spaces
MOST_GIB = 2**20  # of one GPU; far more than there are
FRAGMENTED = 0.05  # assumed: share of the rest that the allocator holds and cannot use
NETWORK_GBIT_S = 400.0  # assumed: of one host, in one direction


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; `device` is its name as PyTorch tells it, "" where only the memory is known."""

    name: str
    device: str
    memory_gib: float
    link_gb_s: float | None = None

    @property
    def usable_bytes(self) -> int:
        """What training may take of it."""
        return int((self.memory_gib - RESERVED_GIB) * (1 - FRAGMENTED) * GIB)

    def peak(self, precision: PrecisionConfig) -> float | None:
        """Returns the published peak of the products of a run, in FLOP/s; None where none is."""
        return published_peak(self.device, products_in(precision))


def products_in(precision: PrecisionConfig) -> str:
    """Returns what a GPU computes products in, as `train.flops` names its peaks: fp8 is rounded to in fp32."""
    native = precision.compute if precision.compute in ("fp32", "bf16", "fp16") else "fp32"
    return "tf32" if precision.tf32 and native == "fp32" else native


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", "NVIDIA H200", 139.8, 450.0),
        Gpu("h100", "NVIDIA H100 80GB HBM3", 79.1, 450.0),
        Gpu("h100-pcie", "NVIDIA H100 PCIe", 79.1, 64.0),
        Gpu("a100-80", "NVIDIA A100-SXM4-80GB", 79.1, 300.0),
        Gpu("a100-40", "NVIDIA A100-SXM4-40GB", 39.4, 300.0),
        Gpu("v100-32", "Tesla V100-SXM2-32GB", 31.7, 150.0),
        Gpu("v100-16", "Tesla V100-SXM2-16GB", 15.8, 150.0),
        Gpu("a10", "NVIDIA A10", 22.0, 32.0),
        Gpu("t4", "Tesla T4", 14.6, 16.0),
    )
}


def find_gpu(name: str | None, memory_gib: float | None) -> Gpu | None:
    """Returns the GPU of a name, of so much memory, or of this machine; None where neither is given and none is here.

    Raises:
        BadInput: an unknown name, or a memory of nothing.
    """
    if memory_gib is not None and not RESERVED_GIB < memory_gib <= MOST_GIB:
        said = "are no one GPU's" if memory_gib > MOST_GIB else "hold no training"
        limits = f"more than {RESERVED_GIB:g} and at most {MOST_GIB:,}"
        raise BadInput(f"--memory: {memory_gib:g} GiB {said}; give {limits}")
    if name is not None:
        known = GPUS.get(name.lower())
        if known is None:
            mend = f"one of: {', '.join(GPUS)}; or give its memory by --memory GiB"
            raise BadInput(f"--gpu: {name!r} is not a known GPU{nearest(name, list(GPUS))} ({mend})")
        return known if memory_gib is None else Gpu(known.name, known.device, memory_gib, known.link_gb_s)
    if memory_gib is not None:
        return Gpu(f"{memory_gib:g} GiB", "", memory_gib)
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return Gpu(found.name, found.name, found.total_memory / GIB)
