"""GPU-hours from what a run computes and the share of the peak that it will reach, which is said with its source."""

from dataclasses import dataclass
from pathlib import Path

from normscale.claims.cost import steps_of, work_of
from normscale.config.schema import RunConfig
from normscale.errors import StoreError
from normscale.plan.gpus import Gpu, products_in
from normscale.tracking.reader import read_run
from normscale.tracking.spool import SPOOL

ASSUMED_MFU = 0.3  # of a Transformer whose products fill the GPU, without recomputation; narrow models stay far below
RECOMPUTED = 4 / 3  # a checkpointed step runs forward twice: four passes' worth in place of three
NEAR = 4.0  # a run of more than four times the work a step, or less than a quarter, says nothing of this one


@dataclass(frozen=True)
class Rate:
    """The share of its peak that a GPU reaches in the model's own FLOPs, and where the number is from.

    It is what a run would record as its `mfu`: blocks that are computed again take time, and are none of these FLOPs.
    """

    mfu: float
    source: str


@dataclass(frozen=True)
class Hours:
    """What a run takes on some GPUs: hours by the clock, and of all GPUs together."""

    wall: float
    gpu: float
    step_s: float
    rate: Rate
    by_links: bool  # whether a step takes what its bytes take on the slowest link, not what its products take


def hours_of(
    config: RunConfig, flops_a_step: float, gpu: Gpu, gpus: int, rate: Rate, links_s: float = 0.0
) -> Hours | None:
    """Returns the hours of all steps and evaluations; None where the peak of the GPU is not published.

    What ranks wait for each other is part of the rate, not added; but no step is shorter than `links_s`.
    """
    peak = gpu.peak(config.precision)
    if peak is None:
        return None
    products_s = flops_a_step / (peak * rate.mfu * gpus)
    step_s = max(products_s, links_s)
    train = config.train
    steps = train.steps + (steps_of(config) - train.steps) * gpus / passes(config)  # every rank evaluates everything
    return Hours(steps * step_s / 3600, steps * step_s * gpus / 3600, step_s, rate, links_s > products_s)


def passes(config: RunConfig) -> float:
    """Returns the time of a step's products over that of the model's own FLOPs."""
    return RECOMPUTED if config.model.checkpointing else 1.0


def rate_of(config: RunConfig, gpu: Gpu, runs: Path, given: float | None) -> Rate:
    """Returns the MFU that is given, that of the finished run nearest in work on such a GPU, or what is assumed.

    One that is given is that of this very run, recomputation included, as `normscale show` says it of one; the others
    are of runs with or without recomputation, and changed to this run's.
    """
    if given is not None:
        return Rate(given, "given by --mfu")
    found = measured(config, gpu, runs)
    return found or Rate(ASSUMED_MFU / passes(config), "assumed: no comparable run on such a GPU has finished here")


def measured(config: RunConfig, gpu: Gpu, runs: Path) -> Rate | None:
    """Returns the MFU by the finished run on such a GPU, with products in the same precision, whose step is nearest.

    Where one of the two computes blocks again and the other does not, it is that run's with what this one computes.
    """
    wanted, found = work_of(config), []
    for spool in sorted(runs.glob(f"*/{SPOOL}")):
        try:
            record = read_run(spool.parent)
            other = RunConfig.model_validate(record.start["config"])
            mfu = float(record.summary["mfu"]) * passes(other) / passes(config)
            device = str(record.start["identity"]["device_name"])
        except (StoreError, KeyError, TypeError, ValueError, AttributeError):
            continue
        apart = max(work_of(other).flops / wanted.flops, wanted.flops / max(1, work_of(other).flops))
        same = device == gpu.device and _products(other) == _products(config)
        if record.finished and same and apart <= NEAR and 0 < mfu <= 1:
            found.append((apart, record.run_id, mfu))
    if not found:
        return None
    _, name, mfu = min(found)
    return Rate(mfu, f"measured in {name}")


def _products(config: RunConfig) -> tuple[str, str]:
    return config.precision.compute, products_in(config.precision)
