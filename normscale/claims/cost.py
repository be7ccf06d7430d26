"""How long runs take: seconds a step = a + b x layers, from finished runs of this machine or from a short trial."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from normscale.config.schema import RunConfig
from normscale.errors import StoreError
from normscale.tracking.spool import SPOOL, read_run

EVALUATION = 1 / 3  # a forward pass over a batch, in steps
START_S = 0.2  # opening the data and the records
BUILD_S = 0.012  # building one layer, empirical


@dataclass(frozen=True)
class Cost:
    """Seconds a step: `base` and `per_layer`. The defaults are empirical, from a 2-core machine."""

    base: float = 0.004
    per_layer: float = 0.0028

    def of(self, config: RunConfig) -> float:
        """Returns the estimated seconds of a run on one worker."""
        layers = config.model.N + config.model.M
        return START_S + BUILD_S * layers + steps_of(config) * (self.base + self.per_layer * layers)


def steps_of(config: RunConfig) -> float:
    """Returns the work of a run in training steps, its evaluations included."""
    train = config.train
    evaluations = 1 + (train.steps // train.eval_every if train.eval_every else 1)
    updates = (1 + len(config.probes.update.steps)) * config.probes.update.sequences / train.batch
    updates = updates if config.probes.update.steps else 0
    return train.steps + EVALUATION * (evaluations * train.eval_batches + updates)


def fitted(points: Sequence[tuple[int, float]]) -> Cost | None:
    """Returns the cost through (layers, seconds a step) points, or None without two different depths."""
    if len({layers for layers, _ in points}) < 2:
        return None
    layers, seconds = np.array(points, dtype=float).T
    # Relative errors count, so that shallow runs are not drowned by deep ones.
    (base, per_layer), *_ = np.linalg.lstsq(
        np.stack([1 / seconds, layers / seconds], axis=1), np.ones_like(seconds), rcond=None
    )
    return Cost(max(float(base), 1e-4), max(float(per_layer), 1e-5))


def from_finished(runs: Path) -> Cost | None:
    """Returns the cost seen in the finished runs of a folder that ran on this machine; None if there are too few."""
    points = []
    for spool in runs.glob(f"*/{SPOOL}"):
        try:
            record = read_run(spool.parent)
            seconds = float(record.summary["seconds"])
            config = RunConfig.model_validate(record.start["config"])
            here = record.start.get("environment", {}).get("host") == platform.node()
        except (StoreError, KeyError, TypeError, ValueError):
            continue
        if record.finished and here and seconds > START_S and config.train.steps >= 50:
            points.append((config.model.N + config.model.M, seconds / steps_of(config)))
    return fitted(points)
