"""How `bench_probes` says what it has measured: lines, a table for the README, a plot, JSON."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.bench_step import products

if TYPE_CHECKING:
    from tests.bench_probes import Appended, Measured, Ratio

ALWAYS, STEP = "always on", "measured step"
BLUE, RED = "#1f77b4", "#d62728"


def machine() -> dict[str, Any]:
    """Returns where and when it is measured; the rate is that of products in fp32, beside which reading costs."""
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gflops": round(products(tries=20, device="cpu" if cuda is None else "cuda")),
        "torch": torch.__version__,
        **({} if cuda is None else {"device": cuda}),
    }


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the name of the processor, as Linux has it."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "an unknown processor")


def lines_of(found: "Measured") -> list[str]:
    """Returns the lines that say what a cell came to."""
    cell = found.cell
    lines = [
        f"{cell.row}: {cell.batch} x {cell.context} tokens, width {cell.d}; bare step {found.bare_s * 1000:.0f} ms, "
        f"{found.rounds} rounds",
        f"  always-on code alone    {found.alone_s * 1e3:8.3f} ms  {_share(found.alone_s, found)} of a bare step",
        f"  model update            {found.update_s * 1e3:8.3f} ms  {_share(found.update_s, found)} of a bare step",
        f"  memory of the probes    {found.held / 1e6:8.2f} MB  {_memory_verdict(found)}".rstrip(),
    ]
    if found.syncs is not None:
        bare, plain, measured = found.syncs
        lines.append(f"  host waits              bare {bare}, plain {plain}, measured {measured}")
    for one in found.ratios:
        bound = "" if one.bound is None else f"  bound {_percent(one.bound)} %: {one.verdict}"
        lines.append(f"  {one.what:22} {_percent(one.median):>8} %  {_interval(one):>18}{bound}")
    return lines


def table(where: dict[str, Any], cells: Sequence["Measured"], spool: "Appended") -> list[str]:
    """Returns a caption and a table in Markdown."""
    heads = [
        "model", "tokens", "always-on code alone", "always on, in pairs", "measured step", "measured every 50 steps",
        "model update", "memory",
    ]  # fmt: skip
    on = where.get("device", f"{where['cores']} cores, {where['threads']} threads")
    rate = f"products at {where['gflops']} GFLOP/s"
    lines = [f"{where['processor']}, {on}, {rate}, {where['date']}, torch {where['torch']}:", ""]
    lines += [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    for found in cells:
        always, step, every = found.ratios
        amortised = f"{_percent(every.median, 2)} %" + (f", {every.verdict}" if every.verdict else "")
        memory = f"{found.held / 1e6:.1f} MB" + (f", {said}" if (said := _memory_verdict(found)) else "")
        row = [found.cell.row, str(found.cell.batch * found.cell.context), _share(found.alone_s, found)]
        row += [_told(always), _told(step), amortised, _share(found.update_s, found), memory]
        lines.append(f"| {' | '.join(row)} |")
    return [
        *lines,
        "",
        f"Appending one array over {spool.blocks} blocks to the spool takes {spool.record_s * 1e3:.2f} ms (bound 1 ms: "
        f"{spool.verdict}), all {spool.profiles} of a measured step {spool.step_s * 1e3:.1f} ms.",
    ]


def record(where: dict[str, Any], cells: Sequence["Measured"], spool: "Appended") -> dict[str, Any]:
    """Returns all of it for a JSON file."""
    return {
        "machine": where,
        "spool": asdict(spool) | {"verdict": spool.verdict},
        "cells": [jsonable(one) for one in cells],
    }


def jsonable(found: "Measured") -> dict[str, Any]:
    """Returns one cell for a JSON file."""
    ratios = [asdict(one) | {"verdict": one.verdict} for one in found.ratios]
    return asdict(found) | {"ratios": ratios}


def draw(where: dict[str, Any], cells: Sequence["Measured"], path: Path) -> None:
    """Draws the intervals of all cells, with their bounds; rows are those of the table."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(10, 2.0 + 0.36 * len(cells)), layout="constrained")
    for place, (axes, kind) in enumerate(zip(figure.subplots(1, 2, sharey=True), (ALWAYS, STEP), strict=True)):
        for row, one in enumerate(cells):
            value = next(entry for entry in one.ratios if entry.what == kind)
            percent = [100 * (x - 1) for x in (value.median, value.low, value.high)]
            axes.plot(percent[1:], [row, row], color=BLUE, linewidth=3, solid_capstyle="round")
            axes.plot(percent[0], row, "o", color=BLUE)
            if value.bound is not None:
                axes.plot([100 * (value.bound - 1)] * 2, [row - 0.35, row + 0.35], color=RED, linewidth=2)
        axes.axvline(0, color="#999999", linewidth=0.8)
        axes.set_xlabel("always on: % over a bare step" if kind == ALWAYS else "measured step: % over always on")
        axes.grid(axis="x", color="#dddddd")
        axes.set_axisbelow(True)
        if not place:
            axes.set_yticks(range(len(cells)), [one.cell.row for one in cells])
            axes.invert_yaxis()
    key = [
        Line2D([], [], color=BLUE, marker="o", linewidth=3, label="median and its 95 % interval"),
        Line2D([], [], color=RED, linewidth=2, label="bound: met where the whole interval lies left of it"),
    ]
    figure.legend(handles=key, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(f"What the probes cost a training step: {where['processor']}, {where['date']}", fontsize=11)
    figure.savefig(path, dpi=130)


def _told(one: "Ratio") -> str:
    verdict = f", {one.verdict}" if one.verdict else ""
    return f"{_percent(one.median)} % {_interval(one)}{verdict}"


def _interval(one: "Ratio") -> str:
    return f"[{_percent(one.low)}, {_percent(one.high)}]"


def _percent(ratio: float, digits: int = 1) -> str:
    return f"{100 * (ratio - 1):+.{digits}f}"


def _share(seconds: float, found: "Measured") -> str:
    return f"{100 * seconds / found.bare_s:.2g} %"


def _memory_verdict(found: "Measured") -> str:
    most = found.cell.most_bytes
    return "" if most is None else "met" if found.held < most else "missed"
