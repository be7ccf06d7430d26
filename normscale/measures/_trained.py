"""Small models that measurements train on text, and their held-out loss."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.data.task import IGNORE, MicroBatch
from normscale.models.stack import Transformer


def config_of(seed: int, steps: int, folder: str, **model: Any) -> RunConfig:
    """Returns the training of a model, with a tenth of the steps to warm up and a checkpoint at the end."""
    train = {"train.steps": steps, "train.optim.lr": 1e-3, "train.schedule.warmup_steps": steps // 10}
    places = {"checkpoint.every": steps, "tracking.runs": folder, "tracking.uri": None}
    settings = {f"model.{key}": value for key, value in model.items()}
    return revise(RunConfig(), {**settings, **train, **places, "seed": seed})


@torch.no_grad()
def loss_of(model: Transformer, batches: Sequence[MicroBatch]) -> float:
    """Returns the mean loss of the targets in nats."""
    losses, targets = 0.0, 0
    for batch in batches:
        logits = model(**batch.inputs).flatten(0, 1)
        losses += float(F.cross_entropy(logits, batch.targets_BT.flatten(), ignore_index=IGNORE, reduction="sum"))
        targets += batch.n_targets
    return losses / targets
