"""How much a training step computes, and how much its device could: what MFU is made of.

Only matrix products count, as in PaLM: forward once, backward twice (the gradients of both factors). Work that is done
again (checkpointed blocks) is not counted, nor are norms, activations, the optimizer and the probes: these are the
model's FLOPs, not the hardware's. A causal product counts whole, although a kernel may skip half of it.

Reference: Chowdhery et al. 2022, arXiv:2204.02311, appendix B; Hoffmann et al. 2022, arXiv:2203.15556, appendix F
(where the embedding counts as a product; here it is a look-up and counts nothing).
"""

import functools
import re
import time
from dataclasses import dataclass

import torch

from normscale.config.precision import Compute
from normscale.config.schema import ModelConfig
from normscale.models.feedforward import GATED, default_ffn_width

FORWARD_BACKWARD = 3  # backward is two products for each one forward
MEASURE_S = 0.05
SIDE = 512  # of the measured product: a megabyte of fp32 a factor, so that it computes instead of waiting for memory


@dataclass(frozen=True)
class Lengths:
    """Positions of one sequence as they are computed, padding included; `source` is 0 where there is one stack."""

    target: int
    source: int = 0


def lengths_of(config: ModelConfig) -> Lengths:
    """Returns the lengths of a model's full context."""
    return Lengths(config.context, config.context if config.N and config.M else 0)


def flops_per_sequence(config: ModelConfig, vocab: int, lengths: Lengths) -> int:
    """Returns the FLOPs of one sequence, forward and backward; a multiplication and an addition are two."""
    T, S = lengths.target, lengths.source
    both = bool(config.N and config.M)
    encoder = config.N * (_attention(config, S if both else T, S if both else T) + _ffn(config, S if both else T))
    decoder = config.M * (_attention(config, T, T) + _ffn(config, T) + (_attention(config, T, S) if both else 0))
    return 2 * FORWARD_BACKWARD * (encoder + decoder + T * config.d * vocab)


def flops_per_step(config: ModelConfig, vocab: int, batch: int, lengths: Lengths | None = None) -> int:
    """Returns the FLOPs of one optimizer step over all ranks: `batch` sequences, of the full context unless told."""
    return batch * flops_per_sequence(config, vocab, lengths or lengths_of(config))


def _attention(config: ModelConfig, queries: int, keys: int) -> int:
    """Returns the multiplications of one attention forward: q and o, k and v, then scores and their mix of v."""
    d, latent = config.d, config.kv_latent
    k_and_v = 2 * d * d if latent is None else d * latent + 2 * latent * d
    return queries * 2 * d * d + keys * k_and_v + 2 * queries * keys * d


def _ffn(config: ModelConfig, positions: int) -> int:
    """Returns the multiplications of one feed-forward sublayer forward; a gated one has three products."""
    width = config.ffn or default_ffn_width(config.d, config.activation)
    return positions * config.d * width * (3 if config.activation in GATED else 2)


# Dense peaks in TFLOP/s by what products are computed in: fp32 outside the tensor cores, tf32, fp16 and bf16 with fp32
# sums. From NVIDIA's data sheets, which often print twice the number (with sparsity); Turing and Volta have no bf16. A
# device that is not here is measured.
_HALVES = ("fp16", "bf16")
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"V100-SXM\d.*", {"fp32": 15.7, "fp16": 125.0}),
    (r"V100-PCIE.*", {"fp32": 14.0, "fp16": 112.0}),
    (r"T4", {"fp32": 8.1, "fp16": 65.0}),
    (r"A100.*", {"fp32": 19.5, "tf32": 156.0, **dict.fromkeys(_HALVES, 312.0)}),
    (r"A10", {"fp32": 31.2, "tf32": 62.5, **dict.fromkeys(_HALVES, 125.0)}),
    (r"H100 PCIe", {"fp32": 51.2, "tf32": 378.0, **dict.fromkeys(_HALVES, 756.5)}),
    (r"H100( 80GB HBM3)?|H200|GH200.*", {"fp32": 67.0, "tf32": 494.5, **dict.fromkeys(_HALVES, 989.5)}),
)


@dataclass(frozen=True)
class Peak:
    """The products a device could do at best, in FLOP/s, and where the number is from."""

    flops_s: float
    source: str  # "published" or "measured GEMM"


def peak_of(device: torch.device, compute: Compute, tf32: bool = False) -> Peak:
    """Returns the peak of one device for what the products of a run are really computed in.

    That is fp32 for fp8, which is always rounded to, and for fp16 on a CPU. A device that is not in the table, or a
    slice of one (MIG), is measured.
    """
    cuda = device.type == "cuda"
    native = compute if compute in ("fp32", "bf16") or (compute == "fp16" and cuda) else "fp32"
    if cuda:
        column = "tf32" if tf32 and native == "fp32" else native
        published = published_peak(torch.cuda.get_device_name(device), column)
        if published is not None:
            return Peak(published, "published")
    return Peak(gemm_rate(str(device) if cuda else "cpu", native, torch.get_num_threads()), "measured GEMM")


def published_peak(name: str, column: str) -> float | None:
    """Returns the published dense peak of a CUDA device in FLOP/s, None where the name is not exactly a known one."""
    model = re.sub(r"^(NVIDIA|Tesla)\s+(Tesla\s+)?", "", name)
    for pattern, peaks in _PEAKS:
        if re.fullmatch(pattern, model) and "MIG" not in name:
            return peaks[column] * 1e12 if column in peaks else None
    return None


@functools.cache
def gemm_rate(device: str, compute: str, threads: int) -> float:
    """Returns the FLOP/s of the best of several square products, measured once a process for these arguments.

    It draws no random number. `threads` is part of the question, since another number of them has another rate.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(compute, torch.float32)
    side = SIDE if device == "cpu" else 16 * SIDE
    factor, out = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    best, until = float("inf"), time.perf_counter() + MEASURE_S
    with torch.no_grad():
        torch.mm(factor, factor, out=out)  # the first one allocates and starts threads
        _wait(device)
        while best == float("inf") or time.perf_counter() < until:
            begun = time.perf_counter()
            torch.mm(factor, factor, out=out)
            _wait(device)
            best = min(best, time.perf_counter() - begun)
    return 2 * side**3 / best


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
