"""How gradients go through a deep model at initialisation, with its norms and with all of them taken out."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.data.batches import Batches
from normscale.data.task import load_task
from normscale.measures._modules import without
from normscale.models.builder import build
from normscale.norms import Norm

BATCH, SPAN = 2, 10

Init = Literal["xavier_normal", "normal"]


def measure(seed: int, scheme: str, norms: bool, blocks: int, init: Init = "xavier_normal") -> dict[str, float]:
    """Returns, of one backward pass in fp64 through a decoder on text:

    - `range`: log10 of the largest over the smallest gradient norm of a block's weights (norms' own left out);
    - `growth`: log10 of the largest factor by which that norm grows over 10 blocks on the way down.

    Without norms attention's logits outgrow the digits of fp32, in which a fused kernel, which computes the
    probabilities a second time on the way back, then has infinite ones: an overflow without growth. Both numbers are
    NaN where a block's gradient is 0, or not finite all the same.
    """
    model_settings = {"model.scheme": scheme, "model.M": blocks, "model.init": init, "model.positions": "learned"}
    config = revise(RunConfig(), {**model_settings, "train.batch": BATCH, "seed": seed})
    task = load_task(config)
    model = build(config.model, task.vocab, seed).double()
    own = {id(p) for module in model.modules() if isinstance(module, Norm) for p in module.parameters()}
    if not norms:
        without(model, Norm)
    batch = Batches(task.train, batch=BATCH, seed=seed).window(0)[0]
    logits = model(batch.tokens_BT, **batch.beside)
    nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten()).backward()  # type: ignore[no-untyped-call]
    sizes = [_size([p for p in block.parameters() if id(p) not in own]) for block in model.blocks]
    return profile(sizes)


def profile(sizes: Sequence[float]) -> dict[str, float]:
    """Returns the two numbers of the gradient norms of blocks, from the lowest to the highest."""
    if not all(0 < size < math.inf for size in sizes):
        return {"range": math.nan, "growth": math.nan}
    logs = [math.log10(size) for size in sizes]
    pairs = zip(logs, logs[SPAN:], strict=False)
    return {
        "range": max(logs) - min(logs),
        "growth": max((lower - upper for lower, upper in pairs), default=0.0),
    }


def _size(parameters: list[nn.Parameter]) -> float:
    return float(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm())
