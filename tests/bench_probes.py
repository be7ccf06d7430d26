"""Measures what the probes cost a training step; `make bench-probes` prints it. Not a test: machines are noisy.

Three kinds of step take turns on one model, in an order that changes from round to round: a bare one (forward,
backward, optimizer, nothing looked at), the trainer's own between two measured ones ("always on": loss and gradient
norm read, applied or not, ledger, spike scores), and a measured one with every probe that has no pass of its own. Cost
is CPU time of the process on a CPU, since other processes do not count in it, and time on the device on a GPU. Cells of
Monitor do the same with a loop that somebody has written by hand; their bare step has no hook on any module.

Each bound is *met* where the whole 95 % interval of the ratio lies below it, *missed* where it lies above, else *not
resolved* by this many rounds. The interval is a bootstrap of the median over rounds. How many there are is declared
before anything is measured: to stop once an interval looks right would make bounds met that are not.

Timed apart: the always-on code by itself, a measurement of the model update (a forward pass on a fixed batch, which
runs at an interval of its own), and how long it takes to append the records of a deep model to a spool. And counted:
the bytes that the probes hold while a measured step is applied.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from normscale.config.schema import RunConfig
from normscale.tracking.spool import SpoolWriter
from normscale.train.engines.ranks import world_size
from tests.bench_probes_loops import NEVER, Loop, MonitorLoop, TrainerLoop, clock
from tests.bench_probes_told import draw, jsonable, lines_of, machine, record, table
from tests.host_waits import device_waits

EVERY = 50  # the interval of the amortised figure
RESAMPLED = 2000
ALONE = 200  # steps of the always-on code by itself
MOST_BYTES = 16_000_000  # that probes may hold at 1000 blocks, the run-up apart
MOST_APPEND_S = 1e-3


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
    monitor: bool = False
    rounds: int = 60
    always: float | None = None
    measured: float | None = None
    most_bytes: int | None = None

    @property
    def row(self) -> str:
        """What the table and the plot call it."""
        words = [f"{self.blocks} blocks", f"d={self.d}" if self.d != 64 else ""]
        words += [f"{self.processes} processes" if self.processes > 1 else "", "compiled" if self.compiled else ""]
        return ("Monitor, " if self.monitor else "") + ", ".join(word for word in words if word)

    def config(self, **probes: Any) -> RunConfig:
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
            train={"steps": NEVER, "batch": self.batch, "optim": {"lr": 1e-5}},
            probes={"every": NEVER, **probes},
            tracking={"uri": None},
        )


CELLS = {
    cell.name: cell
    for cell in (
        Cell("100", 100, 64, 8, 64, always=1.01),
        Cell("100 compiled", 100, 64, 8, 64, compiled=True, always=1.01),
        Cell("100 x2", 100, 64, 8, 64, processes=2, always=1.01),
        Cell("100 compiled x2", 100, 64, 8, 64, compiled=True, processes=2, always=1.01),
        Cell("d256", 24, 256, 8, 128, rounds=60, always=1.01, measured=1.05),
        Cell("d256 compiled", 24, 256, 8, 128, compiled=True, rounds=60, always=1.01, measured=1.05),
        Cell("500", 500, 64, 2, 64, rounds=20),
        Cell("1000", 1000, 64, 2, 64, always=1.02, most_bytes=MOST_BYTES),
        Cell("monitor 100", 100, 64, 8, 64, monitor=True, rounds=40, always=1.01),
        Cell("monitor 1000", 1000, 64, 2, 64, monitor=True, rounds=20, always=1.02, most_bytes=MOST_BYTES),
        Cell("smoke", 2, 32, 2, 16),
        Cell("smoke x2", 2, 32, 2, 16, processes=2),
        Cell("monitor smoke", 2, 32, 2, 16, monitor=True),
    )
}
USUAL = [name for name in CELLS if "smoke" not in name]


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
    """What one cell came to.

    Attributes:
        bare_s: CPU (or GPU) time of a bare step; alone_s: of the always-on code; update_s: of a model update.
        held: bytes that the probes hold while a measured step is applied.
        syncs: how often a bare, a plain and a measured step make the host wait for a GPU.
    """

    cell: Cell
    rounds: int
    bare_s: float
    alone_s: float
    update_s: float
    held: int
    syncs: tuple[int, ...] | None
    ratios: tuple[Ratio, ...]


@dataclass(frozen=True)
class Appended:
    """Medians of the seconds that a spool takes for one array over a model's sites, and for all of a measured step."""

    blocks: int
    record_s: float
    step_s: float
    profiles: int

    @property
    def verdict(self) -> str:
        return "met" if self.record_s <= MOST_APPEND_S else "missed"


def measure(cell: Cell, rounds: int) -> Measured:
    """Returns the costs of one cell, on this rank."""
    with tempfile.TemporaryDirectory() as name:
        loop: Loop = (MonitorLoop if cell.monitor else TrainerLoop)(cell.config(), Path(name))
        for kind in [*loop.steps] * 2:  # compiles, allocates
            loop.ready(kind)
            loop.steps[kind]()
        taken: dict[str, list[float]] = {kind: [] for kind in loop.steps}
        order = list(loop.steps)
        for turn in range(rounds):
            for kind in order:
                loop.ready(kind)
                started = clock(loop.device)
                loop.steps[kind]()
                taken[kind].append(clock(loop.device) - started)
            order = order[1:] + order[:1] if turn % 2 else order[::-1]
        loop.ready("measured")
        alone_s, update_s, held = loop.alone(ALONE), loop.update_s(), loop.held()
        syncs = tuple(map(device_waits, loop.steps.values())) if loop.device.type == "cuda" else None
        loop.close()
    ratios = (
        ratio("always on", taken["always on"], taken["bare"], cell.always),
        ratio("measured step", taken["measured"], taken["always on"], cell.measured),
    )
    step = ratios[1]
    amortised = tuple(1 + (value - 1) / EVERY for value in (step.median, step.low, step.high))
    every = Ratio(f"measured every {EVERY}", *amortised, None if cell.measured is None else 1.005)
    bare_s = statistics.median(taken["bare"])
    return Measured(cell, len(taken["bare"]), bare_s, alone_s, update_s, held, syncs, (*ratios, every))


def ratio(what: str, taken: Sequence[float], against: Sequence[float], bound: float | None) -> Ratio:
    """Returns the ratio of paired times: the median over rounds, and its bootstrap interval."""
    ratios = np.array(taken) / np.array(against)
    draws = np.random.default_rng(0).choice(ratios, (RESAMPLED, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return Ratio(what, float(np.median(ratios)), float(low), float(high), bound)


def appended(blocks: int = 1000, profiles: int = 25, tries: int = 50) -> Appended:
    """Returns how long a spool takes for the records of a deep model, which has two sites a block; in wall time."""
    rows = np.random.default_rng(0).standard_normal(2 * blocks)
    values = {"loss_train": 3.0, "grad_norm": 1.0, "lr": 1e-3, "spike": 0.0}
    one, whole = [], []
    with tempfile.TemporaryDirectory() as name, SpoolWriter(Path(name) / "run", 1) as spool:
        for step in range(tries):
            begun = time.perf_counter()
            spool.metrics(step, step, values)
            for _ in range(profiles):
                before = time.perf_counter()
                spool.profile(step, "stream_rms", rows)
                one.append(time.perf_counter() - before)
            whole.append(time.perf_counter() - begun)
    return Appended(blocks, statistics.median(one), statistics.median(whole), profiles)


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-probes", description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default=",".join(USUAL), help=f"of {', '.join(CELLS)} (default: all but smoke)")
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
    where, cells = machine(), []
    for name in names:
        cell = CELLS[name]
        cells.append((spawn if cell.processes > 1 else measure)(cell, asked.rounds or cell.rounds))
        print("\n".join(["", *lines_of(cells[-1])]), flush=True)
    spool = appended()
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "probes.json").write_text(json.dumps(record(where, cells, spool), indent=1) + "\n", encoding="utf-8")
    draw(where, cells, asked.out / "probes.png")
    print("\n".join(["", *table(where, cells, spool)]))
    print(f"\nwritten: {asked.out / 'probes.json'}, {asked.out / 'probes.png'}")


if __name__ == "__main__":
    main()
