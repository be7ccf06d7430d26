"""How gradients go through a deep model at initialisation, with its norms and with all of them taken out."""

import math
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
ENDLESS = 38.0  # decades: what counts for a gradient that is not finite in fp32

Init = Literal["xavier_normal", "normal"]


def measure(seed: int, scheme: str, norms: bool, blocks: int, init: Init = "xavier_normal") -> dict[str, float]:
    """Returns, of one backward pass through a decoder on text:

    - `range`: log10 of the largest over the smallest gradient norm of a block's weights (norms' own left out);
    - `growth`: log10 of the largest factor by which that norm grows over 10 blocks on the way down, 38 where one of
      them is not finite.
    """
    model_settings = {"model.scheme": scheme, "model.M": blocks, "model.init": init, "model.positions": "learned"}
    config = revise(RunConfig(), {**model_settings, "train.batch": BATCH, "seed": seed})
    task = load_task(config)
    model = build(config.model, task.vocab, seed)
    own = {id(p) for module in model.modules() if isinstance(module, Norm) for p in module.parameters()}
    if not norms:
        without(model, Norm)
    batch = Batches(task.train, batch=BATCH, seed=seed).window(0)[0]
    logits = model(batch.tokens_BT, **batch.beside)
    nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten()).backward()  # type: ignore[no-untyped-call]
    sizes = [_size([p for p in block.parameters() if id(p) not in own]) for block in model.blocks]
    if not all(map(math.isfinite, sizes)):
        return {"range": ENDLESS, "growth": ENDLESS}
    logs = [math.log10(max(size, 10**-ENDLESS)) for size in sizes]  # what has vanished did not explode
    pairs = zip(logs, logs[SPAN:], strict=False)
    return {
        "range": max(logs) - min(logs),
        "growth": max((lower - upper for lower, upper in pairs), default=0.0),
    }


def _size(parameters: list[nn.Parameter]) -> float:
    grads = [p.grad.double().square().sum() for p in parameters if p.grad is not None]
    return float(torch.stack(grads).sum().sqrt())
