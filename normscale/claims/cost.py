"""What runs cost: seconds a step from what a step computes, fitted to finished runs of this machine or to a trial.

On a CPU seconds are those of a core, which other work on the machine does not lengthen as it does those of the clock;
and runs with other threads than those the estimate is for say nothing of them.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from normscale.config.schema import RunConfig
from normscale.errors import StoreError
from normscale.measures.config import MeasureConfig
from normscale.progress import figure
from normscale.tracking.reader import read_run
from normscale.tracking.spool import SPOOL

Device = Literal["cpu", "cuda"]

EVALUATION = 1 / 3  # a forward pass over a batch, in steps
START_S = 0.2  # opening the data and the records
BUILD_S = 0.006  # building one sublayer, empirical
TRUST = 0.1  # the weight of the default's proportions beside one measured run
LONG_S = 10.0  # a run of so many seconds counts as one, a shorter one as its share of it
LEAST = 0.005  # of the default's proportions a fit leaves at least so much, since no work takes no time
DOUBT = 4.0  # the default counts as so many runs
ENOUGH = 20.0  # runs after which no trial tells more
SLOWER = {"bf16": 2.2, "fp16": 1.9, "fp8_e4m3": 2.4, "fp8_e5m2": 2.4}
"""How much longer a step takes on a CPU with other products than fp32; empirical, at width 64."""


@dataclass(frozen=True)
class StepWork:
    """What one training step does: sublayers run (again for each micro-batch), values that pass one, FLOPs."""

    sublayers: int
    values: int
    flops: int


def work_of(config: RunConfig) -> StepWork:
    """Returns the work of one step of a run, with the sequences as long as its context."""
    from normscale.train.flops import flops_per_step, lengths_of  # it imports torch

    model, lengths = config.model, lengths_of(config.model)
    both = config.topology == "encoder-decoder"
    encoder, decoder = 2 * model.N, (3 if both else 2) * model.M
    positions = encoder * (lengths.source if both else lengths.target) + decoder * lengths.target
    return StepWork(
        sublayers=(encoder + decoder) * config.train.accumulate,
        values=positions * model.d * config.train.batch,
        flops=flops_per_step(model, config.data.expected_vocab, config.train.batch),
    )


@dataclass(frozen=True)
class Cost:
    """Seconds a step on one worker, by what it does. The defaults are empirical, from one idle core of 2024."""

    base: float = 0.0005
    per_sublayer: float = 0.0004
    per_value: float = 1.1e-8
    per_flop: float = 7e-12
    source: str = "the speed of another machine, as no run of 50 steps has finished on this one"
    device: Device = "cpu"

    def step(self, config: RunConfig) -> float:
        """Returns the estimated seconds of one training step."""
        work = work_of(config)
        seconds = self.base + self.per_sublayer * work.sublayers
        return slowness(config, self.device) * (seconds + self.per_value * work.values + self.per_flop * work.flops)

    def of(self, config: RunConfig | MeasureConfig) -> float:
        """Returns the estimated seconds of a run on one worker; of a measurement what its claim says."""
        if isinstance(config, MeasureConfig):
            return START_S + config.seconds
        sublayers = work_of(config).sublayers // config.train.accumulate
        return START_S + BUILD_S * sublayers + steps_of(config) * self.step(config)


DEFAULTS: Mapping[Device, Cost] = {
    "cpu": Cost(),
    "cuda": Cost(0.003, 0.0005, 1e-11, 1e-14, "the speed of a GPU at large", "cuda"),
}
"""What a fit starts from. Those of a GPU are orders of magnitude, not measured: 100 TFLOP/s, and 3 TB/s for a value
that is read or written some ten times; a core takes as long to launch its kernels as to compute a small sublayer."""


def slowness(config: RunConfig, device: Device) -> float:
    """Returns how much longer a step takes than one with fp32 products."""
    return SLOWER.get(config.precision.compute, 1.0) if device == "cpu" else 1.0


def steps_of(config: RunConfig) -> float:
    """Returns the work of a run in training steps, its evaluations included."""
    train = config.train
    evaluations = 1 + (train.steps // train.eval_every if train.eval_every else 1)
    probe = config.probes.update
    measured = len(probe.steps) + (train.steps // probe.every if probe.every else 0)
    updates = (1 + measured) * probe.sequences / train.batch if measured else 0
    return train.steps + EVALUATION * (evaluations * train.eval_batches + updates)


def fitted(points: Sequence[tuple[RunConfig, float]], source: str, device: Device = "cpu") -> Cost | None:
    """Returns the cost through the seconds a step of some runs; None without any.

    Runs that differ in depth alone cannot tell a sublayer's overhead from its products: what they leave open keeps the
    proportions of the device's default, scaled to this machine.
    """
    if not points:
        return None
    default = DEFAULTS[device]
    seconds = np.array([each for _, each in points])
    scale = float(np.median(seconds / [default.step(config) for config, _ in points]))
    prior = scale * np.array([default.base, default.per_sublayer, default.per_value, default.per_flop])
    rows = [
        slowness(config, device) * np.array([1, work.sublayers, work.values, work.flops]) * prior
        for config, work in ((config, work_of(config)) for config, _ in points)
    ]
    # Relative errors count, so that shallow runs are not drowned by deep ones. The unknowns are factors on the prior.
    measured = np.array(rows) / seconds[:, None]
    left = np.concatenate([measured, TRUST**0.5 * np.eye(4)])
    right = np.concatenate([np.ones(len(points)), TRUST**0.5 * np.ones(4)])
    factors, *_ = np.linalg.lstsq(left, right, rcond=None)
    base, per_sublayer, per_value, per_flop = (float(x) for x in np.maximum(factors, LEAST) * prior)
    return Cost(base, per_sublayer, per_value, per_flop, source, device)


def from_finished(runs: Path, device: Device = "cpu", threads: int = 1, enough: float = 0.0) -> Cost | None:
    """Returns the cost seen in the finished runs of a folder that ran on this machine; None if there are none.

    On a CPU those count that one process of so many threads trained. The fewer they are, and the shorter, the nearer
    the cost stays to the default; None where they count as fewer than `enough`.
    """
    points, evidence = [], 0.0
    for spool in sorted(runs.glob(f"*/{SPOOL}")):
        try:
            record = read_run(spool.parent)
            config = RunConfig.model_validate(record.start["config"])
            seconds = float(record.summary["seconds"])
            identity = record.start.get("identity", {})
            same = identity.get("device", "cpu") == device
            if device == "cpu":
                seconds = min(seconds, float(record.summary.get("thread_s", seconds)))
                same &= (identity.get("threads"), identity.get("world")) == (threads, 1)
            here = record.start.get("environment", {}).get("host") == platform.node()
        except (StoreError, KeyError, TypeError, ValueError, AttributeError):
            continue
        if record.finished and here and same and seconds > START_S and config.train.steps >= 50:
            points.append((config, seconds / steps_of(config)))
            evidence += min(1.0, seconds / LONG_S)
    if not points or (device == "cpu" and evidence < enough):
        return None
    seen = f"{len(points)} finished run{'s' * (len(points) != 1)} on this machine"
    if device != "cpu":  # whose default says nothing of how fast it is
        return fitted(points, seen, device)
    share = evidence / (evidence + DOUBT)
    with_threads = f" with {threads} thread{'s' * (threads != 1)}"
    source = f"{seen}{with_threads}, which count{'s' * (len(points) == 1)} {share:.0%} beside the speed of another"
    found = fitted(points, source, device)
    return found and drawn(found, share)


def drawn(cost: Cost, share: float) -> Cost:
    """Returns a cost between the default (a share of 0) and this one (1), in logarithms: no outlier pulls far."""
    default = Cost()
    base, per_sublayer, per_value, per_flop = (
        usual * (own / usual) ** share
        for own, usual in (
            (cost.base, default.base),
            (cost.per_sublayer, default.per_sublayer),
            (cost.per_value, default.per_value),
            (cost.per_flop, default.per_flop),
        )
    )
    return Cost(base, per_sublayer, per_value, per_flop, cost.source, cost.device)


def memory_of_nearest(runs: Path, config: RunConfig, device: Device) -> tuple[str, float] | None:
    """Returns (name, peak memory in bytes) of the finished run here whose step is nearest in work; None without one.

    A run of less than half or more than twice the work says too little.
    """
    wanted, found = work_of(config), []
    for spool in sorted(runs.glob(f"*/{SPOOL}")):
        try:
            record = read_run(spool.parent)
            there = work_of(RunConfig.model_validate(record.start["config"]))
            memory = float(record.summary["peak_memory_bytes"])
            here = record.start.get("environment", {}).get("host") == platform.node()
            here &= record.start.get("identity", {}).get("device", "cpu") == device
        except (StoreError, KeyError, TypeError, ValueError, AttributeError):
            continue
        apart = abs(np.log2(max(1, there.values) / max(1, wanted.values)))
        if record.finished and here and apart <= 1:
            found.append((float(apart), record.run_id, memory))
    return min(found)[1:] if found else None


def hours(seconds: float, device: Device) -> str:
    """Returns time of one core or of one GPU in hours."""
    return f"{figure(seconds / 3600)} {'core' if device == 'cpu' else 'GPU'}-hours"
