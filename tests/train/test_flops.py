"""The formula against PyTorch's own count of the products that ran."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.train import flops
from normscale.train.flops import Lengths, flops_per_sequence, flops_per_step, gemm_rate, peak_of, published_peak

VOCAB, BATCH = 11, 3
SMALL: dict[str, Any] = {"N": 0, "d": 16, "heads": 2, "context": 12}


def counted(config: ModelConfig, lengths: Lengths) -> int:
    """What PyTorch counts in one forward and backward pass."""
    model = build(config, VOCAB, seed=0)
    beside = {"source_BS": torch.zeros(BATCH, lengths.source, dtype=torch.int64)} if lengths.source else {}
    tokens = torch.zeros(BATCH, lengths.target, dtype=torch.int64)
    # The fused CPU kernel is not in the counter's table; the plain one is made of products that are.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(tokens, **beside)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        ({"M": 2}, Lengths(12)),
        ({"M": 2}, Lengths(7)),
        ({"M": 1, "scheme": "pre", "tied": False, "positions": "learned", "bias": False}, Lengths(12)),
        ({"M": 2, "activation": "swiglu"}, Lengths(12)),
        ({"M": 1, "activation": "geglu", "ffn": 20}, Lengths(12)),
        ({"M": 2, "kv_latent": 6, "qk_norm": "head"}, Lengths(12)),
        ({"N": 2, "M": 0}, Lengths(12)),
        ({"N": 1, "M": 2}, Lengths(12, 12)),
        ({"N": 2, "M": 1}, Lengths(5, 9)),
        ({"N": 3, "M": 1, "kv_latent": 4, "activation": "relu"}, Lengths(9, 4)),
    ],
)
def test_the_formula_counts_the_products_that_run(changes: dict[str, Any], lengths: Lengths) -> None:
    config = ModelConfig(**SMALL | changes)
    assert BATCH * flops_per_sequence(config, VOCAB, lengths) == counted(config, lengths)


def test_recomputed_blocks_are_not_the_models_work() -> None:
    plain, again = ModelConfig(**SMALL, M=2), ModelConfig(**SMALL, M=2, checkpointing=True)
    assert flops_per_step(plain, VOCAB, BATCH) == flops_per_step(again, VOCAB, BATCH)
    assert counted(again, Lengths(12)) > counted(plain, Lengths(12))


def test_the_rule_of_six_and_palms_attention() -> None:
    config = ModelConfig(M=12, d=64, heads=4, context=64)
    matrices = 12 * 12 * 64**2 + 256 * 64  # 4 d^2 of attention and 8 d^2 of the feed-forward a block; the head
    attention = 12 * 12 * 64 * 64  # PaLM: 12 layers heads width context, of each token
    assert flops_per_step(config, 256, 8) == 8 * 64 * (6 * matrices + attention)


def test_a_full_context_is_taken_unless_lengths_are_told() -> None:
    config = ModelConfig(**SMALL | {"N": 1}, M=1)
    assert flops_per_step(config, VOCAB, 2) == 2 * flops_per_sequence(config, VOCAB, Lengths(12, 12))
    assert flops_per_step(config, VOCAB, 2, Lengths(3, 5)) == 2 * flops_per_sequence(config, VOCAB, Lengths(3, 5))


@pytest.mark.parametrize(
    ("name", "column", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA H100 80GB HBM3", "fp32", 67.0),
        ("NVIDIA H100 PCIe", "tf32", 378.0),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312.0),
        ("NVIDIA A100 80GB PCIe", "bf16", 312.0),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA H200 NVL", "bf16", None),  # another card than the H200
        ("AMD Instinct MI300X", "bf16", None),
    ],
)
def test_published_peaks_are_those_of_exactly_this_device(name: str, column: str, tflops: float | None) -> None:
    assert published_peak(name, column) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_a_gpu_has_the_peak_of_what_its_products_are_really_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    gpu = torch.device("cuda", 0)
    assert peak_of(gpu, "bf16").flops_s == pytest.approx(989.5e12)
    assert peak_of(gpu, "fp32").flops_s == pytest.approx(67e12)
    assert peak_of(gpu, "fp32", tf32=True).flops_s == pytest.approx(494.5e12)
    assert peak_of(gpu, "fp8_e4m3").flops_s == pytest.approx(67e12)  # rounded to, computed in fp32
    assert peak_of(gpu, "bf16").source == "published"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU of tomorrow")
    monkeypatch.setattr(flops, "gemm_rate", lambda device, compute, threads: 5.0 if device == "cuda:0" else 0.0)
    assert (peak_of(gpu, "bf16").flops_s, peak_of(gpu, "bf16").source) == (5.0, "measured GEMM")


def test_a_cpu_is_measured_once_and_draws_no_random_number() -> None:
    gemm_rate.cache_clear()
    state = torch.get_rng_state()
    peak = peak_of(torch.device("cpu"), "fp16")
    assert torch.equal(torch.get_rng_state(), state)
    assert peak.source == "measured GEMM"
    assert math.isfinite(peak.flops_s)
    assert peak.flops_s > 1e8
    assert peak_of(torch.device("cpu"), "fp32") is not peak
    assert peak_of(torch.device("cpu"), "fp32").flops_s == peak.flops_s  # fp16 is rounded to, so both are fp32 products
    assert gemm_rate.cache_info().misses == 1
