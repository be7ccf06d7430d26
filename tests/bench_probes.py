"""Measures what the probes cost a training step; `make bench-probes` prints it. Not a test: machines are noisy.

Three kinds of step take turns on one model, in an order that changes from round to round: a bare one (forward,
backward, optimizer, nothing looked at), the trainer's own between two measured ones ("always on": loss and gradient
norm read, applied or not, ledger, spike scores), and a measured one with every probe that has no pass of its own. Cost
is CPU time of the process on a CPU, since other processes do not count in it, and time on the device on a GPU.

Each bound is *met* where the whole 95 % interval of the ratio lies below it, *missed* where it lies above, else *not
resolved* by this many rounds. The interval is a bootstrap of the median over rounds. How many there are is declared
before anything is measured: to stop once an interval looks right would make bounds met that are not.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from normscale.config.schema import RunConfig
from normscale.data.task import load_task
from normscale.models.builder import build
from normscale.tracking.spool import SpoolWriter
from normscale.train.engines.make import make_engine
from normscale.train.engines.ranks import world_size
from normscale.train.loop import Trainer, summed_loss
from normscale.train.session import Session, Silent

EVERY = 50  # the interval of the amortised figure
RESAMPLED = 2000


@dataclass(frozen=True)
class Cell:
    """One model to measure, on so many processes, and the bounds it is held to (None: published, not held).

    `rounds` are so many that the interval of what is held to a bound of 5 % can lie on one side of it: its half came to
    3 % with 27 rounds at d=256, and shrinks with their root. A bound of 1 % would take thousands; there the always-on
    code by itself tells more.
    """

    name: str
    blocks: int
    d: int
    batch: int
    context: int
    compiled: bool = False
    processes: int = 1
    rounds: int = 60
    always: float | None = None
    measured: float | None = None

    def config(self) -> RunConfig:
        return RunConfig(
            model={
                "scheme": "deepnorm",
                "M": self.blocks,
                "d": self.d,
                "heads": 4,
                "context": self.context,
                "positions": "learned",
                "compile": self.compiled,
            },
            data={"max_bytes": 400_000},
            train={"steps": 10**6, "batch": self.batch, "optim": {"lr": 1e-5}},
            probes={"every": 10**6},
            tracking={"uri": None},
        )


CELLS = {
    cell.name: cell
    for cell in (
        Cell("100", 100, 64, 8, 64, always=1.01),
        Cell("100 compiled", 100, 64, 8, 64, compiled=True, always=1.01),
        Cell("100 x2", 100, 64, 8, 64, processes=2, always=1.01),
        Cell("100 compiled x2", 100, 64, 8, 64, compiled=True, processes=2, always=1.01),
        Cell("d256", 24, 256, 8, 128, rounds=120, always=1.01, measured=1.05),
        Cell("d256 compiled", 24, 256, 8, 128, compiled=True, rounds=120, always=1.01, measured=1.05),
        Cell("500", 500, 64, 2, 64, rounds=20),
        Cell("1000", 1000, 64, 2, 64, always=1.02),
        Cell("smoke", 2, 32, 2, 16),
    )
}


@dataclass(frozen=True)
class Ratio:
    """A cost as a multiple of the bare step's, with the interval of its median and the bound it is held to."""

    what: str
    median: float
    low: float
    high: float
    bound: float | None

    @property
    def verdict(self) -> str:
        if self.bound is None:
            return ""
        return "met" if self.high <= self.bound else "missed" if self.low > self.bound else "not resolved"


@dataclass(frozen=True)
class Measured:
    """What one cell came to. Seconds of CPU (or GPU) time a step; `alone_s` the always-on code by itself."""

    cell: Cell
    rounds: int
    bare_s: float
    alone_s: float
    syncs: tuple[int, int] | None
    ratios: tuple[Ratio, ...]


class Bench:
    """A trainer whose steps can be taken bare, plain or measured."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        config = cell.config()
        task = load_task(config)
        self.engine = make_engine(build(config.model, task.vocab, 0), config)
        self.session = Session(config, task, self.engine)
        self.trainer: Trainer = self.session.trainer
        self.recorder: Any = SpoolWriter(folder, 1) if self.engine.rank == 0 else Silent()
        self.window = self.session.batches.window(0)
        self.measure = False
        self.trainer.measures = lambda step: self.measure  # type: ignore[method-assign]
        self.steps: dict[str, Callable[[], None]] = {
            "bare": self.bare,
            "always on": lambda: self.stepped(False),
            "measured": lambda: self.stepped(True),
        }

    def bare(self) -> None:
        """A step that nothing looks at."""
        engine = self.engine
        count = engine.count(sum(batch.n_targets for batch in self.window))
        engine.zero_grad()
        for i, batch in enumerate(self.window):
            batch = batch.to(engine.device)
            with engine.micro_batch(last=i == len(self.window) - 1):
                with engine.autocast():
                    logits = engine.model(batch.tokens_BT, None, **batch.beside)
                loss = summed_loss(logits, batch.targets_BT)
                engine.backward(loss * (engine.world / count))
        self.trainer.optimizer.step()

    def stepped(self, measured: bool) -> None:
        """A step of the trainer."""
        self.measure = measured
        self.trainer.step(self.window, self.recorder)

    def alone(self, tries: int = 200) -> float:
        """Returns the seconds of a step's always-on code: what the trainer does beside the bare step, by itself."""
        trainer, engine = self.trainer, self.engine
        total = torch.zeros((), device=engine.device)
        begun = clock(engine.device)
        for i in range(tries):
            loss, norm = engine.loss_and_norm(total, 1)
            trainer.spikes.add(3.0 + i % 7 + loss)
            trainer.grad_spikes.add(1.0 + i % 5 + norm)
            trainer.provenance.begin()
            for batch in self.window:
                trainer.provenance.keep(batch)
        return (clock(engine.device) - begun) / tries


def clock(device: torch.device) -> float:
    """Returns seconds: CPU time of this process, or wall time once the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def measure(cell: Cell, rounds: int) -> Measured:
    """Returns the costs of one cell, on this rank."""
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(cell, Path(name))
        device = bench.engine.device
        for step in [*bench.steps.values()] * 2:  # compiles, allocates
            step()
        taken: dict[str, list[float]] = {kind: [] for kind in bench.steps}
        order = list(bench.steps)
        for turn in range(rounds):
            for kind in order:
                started = clock(device)
                bench.steps[kind]()
                taken[kind].append(clock(device) - started)
            order = order[1:] + order[:1] if turn % 2 else order[::-1]
        alone_s = bench.alone()
        syncs = host_reads(bench) if device.type == "cuda" else None
        bench.recorder.close()
        bench.engine.close()
    ratios = (
        ratio("always on", taken["always on"], taken["bare"], cell.always),
        ratio("measured step", taken["measured"], taken["always on"], cell.measured),
    )
    step = ratios[1]
    amortised = tuple(1 + (value - 1) / EVERY for value in (step.median, step.low, step.high))
    bound = None if cell.measured is None else 1.005
    every = Ratio(f"measured every {EVERY}", *amortised, bound)
    return Measured(cell, len(taken["bare"]), statistics.median(taken["bare"]), alone_s, syncs, (*ratios, every))


def host_reads(bench: Bench) -> tuple[int, int]:
    """Returns how often a plain and a measured step make the host wait for the device."""
    import warnings

    counts = []
    for kind in ("always on", "measured"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            bench.steps[kind]()
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(warning.message) for warning in caught))
    return counts[0], counts[1]


def ratio(what: str, taken: Sequence[float], against: Sequence[float], bound: float | None) -> Ratio:
    """Returns the ratio of paired times: the median over rounds, and its bootstrap interval."""
    ratios = np.array(taken) / np.array(against)
    draws = np.random.default_rng(0).choice(ratios, (RESAMPLED, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return Ratio(what, float(np.median(ratios)), float(low), float(high), bound)


def spawn(cell: Cell, rounds: int) -> Measured:
    """Returns what rank 0 of several processes has measured."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as name:
        free.bind(("127.0.0.1", 0))
        port, out = free.getsockname()[1], Path(name) / "measured.json"
        free.close()
        words = [sys.executable, "-m", "tests.bench_probes", "--cells", cell.name, "--rounds", str(rounds)]
        words += ["--rank-out", str(out)]
        threads = str(max(1, (os.cpu_count() or 1) // cell.processes))
        ranks = []
        for rank in range(cell.processes):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(cell.processes)}
            meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": threads}
            ranks.append(subprocess.Popen(words, env={**os.environ, **place, **meet}))
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"{cell.name}: a rank failed")
        found = json.loads(out.read_text(encoding="utf-8"))
    ratios = tuple(Ratio(**{k: v for k, v in entry.items() if k != "verdict"}) for entry in found.pop("ratios"))
    return Measured(**{**found, "cell": cell, "ratios": ratios})


def show(found: Measured) -> None:
    """Prints a cell."""
    cell = found.cell
    print(
        f"\n{cell.name}: {cell.blocks} blocks, d={cell.d}, {cell.batch} x {cell.context} tokens,"
        f" {'compiled' if cell.compiled else 'eager'}, {cell.processes} process(es); bare step"
        f" {found.bare_s * 1000:.0f} ms, {found.rounds} rounds"
    )
    share = found.alone_s / found.bare_s
    print(f"  always-on code alone    {found.alone_s * 1e3:8.3f} ms  {100 * share:.2f} % of a bare step")
    if found.syncs is not None:
        print(f"  host waits              plain {found.syncs[0]}, measured {found.syncs[1]}")
    for one in found.ratios:
        interval = f"[{100 * (one.low - 1):+.2f}, {100 * (one.high - 1):+.2f}]"
        bound = "" if one.bound is None else f"  bound {100 * (one.bound - 1):+.1f} %: {one.verdict}"
        print(f"  {one.what:22} {100 * (one.median - 1):+8.2f} %  {interval:>18}{bound}", flush=True)


def record(found: Sequence[Measured]) -> dict[str, Any]:
    """Returns all of it for a JSON file."""
    processor = platform.processor() or platform.machine()
    machine = {"torch": torch.__version__, "processor": processor, "cores": os.cpu_count()}
    return {"machine": machine, "cells": [jsonable(one) for one in found]}


def jsonable(found: Measured) -> dict[str, Any]:
    """Returns one cell for a JSON file."""
    ratios = [asdict(one) | {"verdict": one.verdict} for one in found.ratios]
    return asdict(found) | {"ratios": ratios}


def draw(found: Sequence[Measured], path: Path) -> None:
    """Draws the intervals of all cells, with their bounds."""
    from matplotlib.figure import Figure

    kinds = ("always on", "measured step")
    figure = Figure(figsize=(9, 1.2 + 0.42 * len(found)), layout="constrained")
    for place, (axes, kind) in enumerate(zip(figure.subplots(1, 2, sharey=True), kinds, strict=True)):
        for row, one in enumerate(found):
            value = next(entry for entry in one.ratios if entry.what == kind)
            percent = [100 * (x - 1) for x in (value.median, value.low, value.high)]
            axes.plot(percent[1:], [row, row], color="#1f77b4", linewidth=3, solid_capstyle="round")
            axes.plot(percent[0], row, "o", color="#1f77b4")
            if value.bound is not None:
                axes.plot([100 * (value.bound - 1)] * 2, [row - 0.35, row + 0.35], color="#d62728", linewidth=2)
        axes.axvline(0, color="#999999", linewidth=0.8)
        axes.set_xlabel(f"{kind}: cost over the step without, % (95 %)")
        axes.grid(axis="x", color="#dddddd")
        axes.set_axisbelow(True)
        if not place:
            axes.set_yticks(range(len(found)), [one.cell.name for one in found])
            axes.invert_yaxis()
    figure.suptitle("red: the bound", x=0.99, ha="right", fontsize=9)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-probes", description=__doc__.splitlines()[0])
    usual = [name for name in CELLS if name != "smoke"]
    parser.add_argument("--cells", default=",".join(usual), help=f"of {', '.join(CELLS)} (default: all but smoke)")
    parser.add_argument("--rounds", type=int, help="of each cell (default: what it declares, 20 to 120)")
    parser.add_argument("--out", type=Path, default=Path("reports/probes"), help="folder (default: %(default)s)")
    parser.add_argument("--rank-out", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    names = asked.cells.split(",")
    if unknown := [name for name in names if name not in CELLS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(CELLS)}")
    if asked.rank_out is not None:
        found = measure(CELLS[names[0]], asked.rounds)
        if os.environ["RANK"] == "0":
            asked.rank_out.write_text(json.dumps(jsonable(found)), encoding="utf-8")
        return
    assert world_size() == 1, "start it once; it starts its own ranks"
    cells = []
    for name in names:
        cell = CELLS[name]
        cells.append((spawn if cell.processes > 1 else measure)(cell, asked.rounds or cell.rounds))
        show(cells[-1])
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "probes.json").write_text(json.dumps(record(cells), indent=1) + "\n", encoding="utf-8")
    draw(cells, asked.out / "probes.png")
    print(f"\nwritten: {asked.out / 'probes.json'}, {asked.out / 'probes.png'}")


if __name__ == "__main__":
    main()
