"""Optimizers over flat parameters, and the learning rate as a function of applied steps."""

import math
from collections.abc import Sequence

import torch

from normscale.config.schema import OptimConfig, ScheduleConfig
from normscale.train.flat import FlatParameters


def build_optimizer(flat: FlatParameters, config: OptimConfig) -> torch.optim.Optimizer:
    """Returns the optimizer over two flat tensors: matrices with weight decay, vectors (norms, biases) without.

    Both optimizers are element-wise, so that running on a flat buffer changes no number.
    """
    matrices, vectors = flat.leaves()
    return optimizer_over([matrices], [vectors], config)


def optimizer_over(
    matrices: Sequence[torch.Tensor], vectors: Sequence[torch.Tensor], config: OptimConfig
) -> torch.optim.Optimizer:
    """Returns the optimizer over matrices with weight decay and vectors without; a group of nothing is left out.

    AdamW's decay is decoupled; SGD's is added to the gradient.
    """
    both = (
        {"params": list(matrices), "weight_decay": config.weight_decay},
        {"params": list(vectors), "weight_decay": 0.0},
    )
    groups = [group for group in both if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(config: ScheduleConfig, peak: float, applied: int, steps: int) -> float:
    """Returns the learning rate of optimizer step `applied` (from 1) of `steps`.

    It counts *applied* steps: a skipped step takes no learning rate with it, and accumulation and ranks do not count.
    Warm-up is linear and reaches the peak at step `warmup_steps`; inverse_sqrt then falls as sqrt(warmup / step),
    cosine to `floor` of the peak at the last step.
    """
    warmup = config.warmup_steps
    if applied <= warmup:
        return peak * applied / warmup
    if config.kind == "inverse_sqrt":
        return peak * math.sqrt(max(warmup, 1) / applied)
    if config.kind == "cosine":
        share = (applied - warmup) / max(steps - warmup, 1)
        return peak * (config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0))))
    return peak
