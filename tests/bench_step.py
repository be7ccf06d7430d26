"""Measures a DeepNorm training step on this CPU against the machine and against others; `make bench-step` prints it.

A step is forward, loss, backward and AdamW. All contenders of a part take turns, one step each a round, and every ratio
is formed within a round, so that the noise of the machine falls on both alike. What compiling costs stands apart, in
the column of the first step: it is seconds once a shape, and less where the compiler's cache knows the shape already.
Not a test: machines are noisy.
"""

import argparse
import gc
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from normscale.train.flops import flops_per_step, gemm_rate
from tests.bench_models import VOCAB, Case, Step, hand_written, ours, torchscale, x_transformers

PARTS = {
    case.name: case
    for case in (
        Case("100", blocks=100, d=64, heads=4, batch=8, context=64),
        Case("200", blocks=200, d=64, heads=4, batch=8, context=64),
        Case("1000", blocks=1000, d=64, heads=4, batch=2, context=64),
        Case("d256", blocks=24, d=256, heads=4, batch=8, context=128),
        Case("smoke", blocks=2, d=32, heads=2, batch=2, context=16),
    )
}
WARM_UP = 2  # steps after the first one that are not counted


@dataclass(frozen=True)
class Contender:
    """Something that steps; `package` is what has to be installed for it, None for the model of this project."""

    name: str
    make: Callable[[Case], Step]
    package: str | None = None

    @property
    def same_model(self) -> bool:
        return self.package is None


CONTENDERS = (
    Contender("ours, compiled", lambda case: ours(case, True)),
    Contender("ours, eager", lambda case: ours(case, False)),
    Contender("hand-written, compiled", lambda case: hand_written(case, True)),
    Contender("hand-written, eager", lambda case: hand_written(case, False)),
    Contender("x-transformers", lambda case: x_transformers(case, False), "x_transformers"),
    Contender("torchscale", lambda case: torchscale(case, False), "torchscale"),
    Contender("x-transformers, compiled", lambda case: x_transformers(case, True), "x_transformers"),
    Contender("torchscale, compiled", lambda case: torchscale(case, True), "torchscale"),
)
USUAL = tuple(c.name for c in CONTENDERS[:6])


@dataclass(frozen=True)
class Row:
    """One contender's numbers: seconds, GFLOP/s, its share of the GEMM rate, and its time as a multiple of ours."""

    contender: str
    first_s: float
    step_s: float
    gflops: float
    share: float
    ratio: float  # median over rounds
    ratio_low: float  # quartiles
    ratio_high: float
    loss: float  # of the first step


def compare(case: Case, contenders: list[Contender], rounds: int, seconds: float) -> tuple[float, list[Row]]:
    """Returns the machine's GFLOP/s and a row for each contender; the first one is what ratios are against.

    It ends after `rounds` rounds, or after the first that is over when `seconds` have passed (three at least).
    """
    torch._dynamo.reset()
    tokens = torch.randint(0, VOCAB, (case.batch, case.context + 1), generator=torch.Generator().manual_seed(0))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    peak = products(case.compute)
    steps, first, losses = [], [], []
    for contender in contenders:
        step = contender.make(case)
        started = time.perf_counter()
        losses.append(step(*batch))
        first.append(time.perf_counter() - started)
        steps.append(step)
    for step in steps * WARM_UP:
        step(*batch)
    times: list[list[float]] = [[] for _ in steps]
    begun = time.perf_counter()
    gc.collect()
    for turn in range(rounds):
        for place in range(len(steps))[:: -1 if turn % 2 else 1]:  # so that nobody always follows the same one
            started = time.perf_counter()
            steps[place](*batch)
            times[place].append(time.perf_counter() - started)
        if turn >= 2 and time.perf_counter() - begun > seconds:
            break
    peak = max(peak, products(case.compute))
    same = [loss for contender, loss in zip(contenders, losses, strict=True) if contender.same_model]
    if same and max(same) - min(same) > 0.01 * min(same):
        raise SystemExit(f"the first losses of the same model differ: {same}; the comparison would mean nothing")
    work = flops_per_step(case.config(False).model, VOCAB, case.batch) / 1e9
    rows = []
    for contender, once, loss, taken in zip(contenders, first, losses, times, strict=True):
        median = statistics.median(taken)
        ratios = [other / own for own, other in zip(times[0], taken, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        rows.append(Row(contender.name, once, median, work / median, work / median / peak, middle, low, high, loss))
    return peak, rows


def has_bf16() -> bool:
    """Tells whether the processor multiplies bf16 numbers itself."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine() in ("arm64", "aarch64")
    return any(flag in flags.split() for flag in ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"))


def products(compute: str = "fp32", tries: int = 3, device: str = "cpu") -> float:
    """Returns the GFLOP/s of this machine's products, measured now: the best of some tries of 50 ms each."""
    return max(gemm_rate.__wrapped__(device, compute, torch.get_num_threads()) for _ in range(tries)) / 1e9


def show(case: Case, peak: float, rows: list[Row]) -> None:
    """Prints one part as a table."""
    print(
        f"\n{case.blocks} blocks, d={case.d}, {case.batch} x {case.context} tokens, {case.compute};"
        f" products of this machine: {peak:.0f} GFLOP/s"
    )
    print(f"{'':26}{'first':>8}{'step':>10}{'GFLOP/s':>9}{'of GEMM':>9}   times {rows[0].contender} [quartiles]")
    for row in rows:
        print(
            f"{row.contender:26}{row.first_s:6.1f} s{row.step_s:8.4f} s{row.gflops:9.1f}{100 * row.share:7.0f} %"
            f"   {row.ratio:.2f} [{row.ratio_low:.2f}, {row.ratio_high:.2f}]",
            flush=True,
        )
    packages = [row for row in rows if row.contender in ("x-transformers", "torchscale")]
    if packages and rows[0].contender == "ours, compiled":
        faster = min(packages, key=lambda row: row.ratio)
        print(f"{rows[0].contender}: {faster.ratio:.2f} times as fast as the faster package ({faster.contender})")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-step", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="100,200,1000,d256", help=f"of {', '.join(PARTS)} (default: %(default)s)")
    parser.add_argument("--compute", help="fp32, bf16 or both (default: both where the processor has bf16 products)")
    names = ", ".join(f"'{c.name}'" for c in CONTENDERS)
    parser.add_argument("--only", action="append", metavar="NAME", help=f"a contender, several times; of {names}")
    parser.add_argument("--rounds", type=int, default=15, help="at most (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=40, help="for the rounds of a part (default: %(default)s)")
    parser.add_argument("--cold", action="store_true", help="compile anew, as if for the first time on this machine")
    parser.add_argument("--json", type=Path, metavar="PATH", help="writes the numbers there too")
    asked = parser.parse_args()
    native = has_bf16()
    if not asked.compute and not native:
        print(
            "this processor has no bf16 products, which would be many times slower: fp32 only (--compute=bf16 insists)"
        )
    computes = (asked.compute or ("fp32,bf16" if native else "fp32")).split(",")
    parts, only = asked.parts.split(","), asked.only or list(USUAL)
    for word, known in ((parts, PARTS), (computes, ("fp32", "bf16")), (only, [c.name for c in CONTENDERS])):
        if unknown := [name for name in word if name not in known]:
            parser.error(f"{unknown[0]!r} is none of {', '.join(known)}")
    missing = {c.package for c in CONTENDERS if c.name in only and c.package and not _installed(c.package)}
    if missing:
        print(f"{' and '.join(sorted(missing))} not installed (README, What it costs): no rows of theirs")
    contenders = [c for c in CONTENDERS if c.name in only and c.package not in missing]
    if not contenders:
        parser.error("nobody is left to run")
    if asked.cold:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="bench-step-")
    machine = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": _processor(),
        **{c.package: version(c.package.replace("_", "-")) for c in contenders if c.package},
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    found: list[dict[str, Any]] = []
    for compute in computes:
        for part in parts:
            case = replace(PARTS[part], compute=compute)
            peak, rows = compare(case, contenders, asked.rounds, asked.seconds)
            show(case, peak, rows)
            found.append({"case": asdict(case), "gemm_gflops": peak, "rows": [asdict(row) for row in rows]})
            gc.collect()
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine, "parts": found}, indent=1) + "\n", encoding="utf-8")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
