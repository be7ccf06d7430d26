"""Measures the figures the project promises; `make bench` prints them. Not a test: machines are noisy.

Each figure is the median of several tries, in a process of its own where start-up is measured.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

TRIES = 5


def median(measure: Callable[[], float], tries: int = TRIES) -> float:
    """Returns the median of several measurements."""
    return statistics.median(measure() for _ in range(tries))


def process(*words: str) -> float:
    """Returns the wall seconds of a Python process."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def build(blocks: int) -> float:
    """Returns the seconds it takes to build a model of width 64."""
    from normscale.config.schema import ModelConfig
    from normscale.models.builder import build as build_model

    started = time.perf_counter()
    build_model(ModelConfig(M=blocks), 256, 0)
    return time.perf_counter() - started


def step(blocks: int, tries: int, compute: str = "fp32") -> tuple[float, float]:
    """Returns the median seconds of a plain and of a measured step: d=64, 64 tokens, batch 8, AdamW, one thread.

    Plain and measured steps take turns, so that the noise of the machine falls on both alike.
    """
    import torch

    from normscale.config.schema import RunConfig
    from normscale.data.task import MicroBatch
    from normscale.models.builder import build as build_model
    from normscale.probes.activations import Activations
    from normscale.probes.gradients import Gradients
    from normscale.tracking.spool import SpoolWriter
    from normscale.train.engines.plain import PlainEngine
    from normscale.train.loop import Trainer
    from normscale.train.observe import subject_of

    torch.set_num_threads(1)
    config = RunConfig(
        model={"M": blocks, "positions": "learned"},
        train={"steps": 10**6},
        probes={"every": 2},
        precision={"compute": compute},
    )
    engine = PlainEngine(build_model(config.model, 256, 0), config.precision, torch.device("cpu"))
    probes = [Activations(), Gradients()]
    for probe in probes:
        probe.attach(subject_of(engine))
    trainer = Trainer(engine, config, probes)
    rows = torch.randint(0, 256, (8, 65))
    times: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        from pathlib import Path

        with SpoolWriter(Path(folder), 1) as spool:
            for _ in range(2 * tries + 2):
                started = time.perf_counter()
                trainer.step([MicroBatch(rows[:, :-1], rows[:, 1:])], spool)
                times[trainer.measures(trainer.attempted)].append(time.perf_counter() - started)
    return statistics.median(times[False]), statistics.median(times[True][1:])


def main() -> None:
    bare = median(lambda: process("-c", "pass"))
    imported = median(lambda: process("-c", "import normscale"))
    print(f"import normscale             {imported - bare:8.3f} s  (and {bare:.3f} s of Python itself)")
    print(f"normscale --help             {median(lambda: process('-m', 'normscale', '--help')):8.3f} s")
    print(f"build 1000 blocks, d=64      {median(lambda: build(1000)):8.3f} s")
    for blocks, tries in ((12, 20), (48, 8), (100, 5)):
        plain, measured = step(blocks, tries)
        print(
            f"step, {blocks:4} blocks            {plain:8.3f} s  (measured step {100 * (measured / plain - 1):+.1f} %)"
        )
    fp32, _ = step(12, 10)
    for compute in ("fp16", "fp8_e4m3"):
        rounded, _ = step(12, 10, compute)
        print(f"step,   12 blocks, {compute:<9} {rounded:8.3f} s  (rounded; {rounded / fp32:.2f} times fp32)")


if __name__ == "__main__":
    main()
