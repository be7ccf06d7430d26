"""Measures the norm kernels on a GPU: GB/s and the share of the device's own copy, beside what else is installed.

`make bench-kernels` prints the table and writes bench.json and bench.png. Not a test: it needs a GPU to itself.

What is timed: one call, between two events of the device, after the host has got ahead of it; the median of many calls
over buffers in rotation, each far larger than the cache. The copy is measured in the same way in the same run.

What GB/s means: the bytes that the operation cannot do without (PASSES, in passes over the activation; weights and
partial sums left out), over the time. Others are given the same bytes, so that GB/s compares speed. "stack" is one
DeepNorm site as it stands in a model, forward and backward: its result goes on both to a branch and to the next site,
so that the sum of the two gradients counts too.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PASSES = {
    ("layernorm", "forward"): 2,
    ("layernorm", "backward"): 3,
    ("rmsnorm", "forward"): 2,
    ("rmsnorm", "backward"): 3,
    ("add_layernorm", "forward"): 4,
    ("add_layernorm", "backward"): 4,
    ("add_rmsnorm", "forward"): 4,
    ("add_rmsnorm", "backward"): 4,
    ("deepnorm", "forward"): 3,
    ("deepnorm", "backward"): 5,
    ("stack", "both"): 8,
}
OPS = tuple(dict.fromkeys(op for op, _ in PASSES))
WIDTHS = (64, 128, 512, 1024, 2048, 4096, 8192, 12288, 16384)
DTYPES = {"bf16": 2, "fp32": 4, "fp16": 2}  # bytes of an entry
ELEMENTS = 2**28
SETS = 3  # buffers in rotation
SITES = 4  # of a stack
EPS, ALPHA = 1e-5, 2.8
OURS, OURS_STATISTICS = "normscale", "normscale + statistics"


@dataclass(frozen=True)
class Row:
    """One measurement. `ms` is the median of a call (of one site in a stack); `share` is of the copy's GB/s."""

    op: str
    way: str
    dtype: str
    width: int
    rows: int
    who: str
    ms: float
    gb_s: float
    share: float
    target: float | None


def target_of(op: str, way: str, width: int) -> float | None:
    """Returns the share of the copy that is aimed at; None for a stack, which is held against eager instead."""
    if way == "both":
        return None
    forward = way == "forward"
    if width <= 256:
        return 0.80 if forward else 0.70
    if 1024 <= width <= 8192:
        return 0.90 if forward else 0.80
    return 0.80 if forward else 0.65


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print(
            "bench-kernels: PyTorch finds no GPU here, and kernels are measured on one; run it where there is one",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda")
    elements = min(options.elements, _fits(device))
    facts = {
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "elements": elements,
        "calls": options.calls,
        "copy_gb_s": {name: copy_rate(device, name, elements, options.calls) for name in options.dtypes},
    }
    print(f"{facts['device']}; {', '.join(f'{k} {v}' for k, v in versions().items())}")
    print("; ".join(f"copy {name} {rate:.0f} GB/s" for name, rate in facts["copy_gb_s"].items()), flush=True)
    rows: list[Row] = []
    for dtype in options.dtypes:
        for op in options.ops:
            for width in options.widths:
                found = measure(
                    op, width, dtype, device, elements, options.calls, facts["copy_gb_s"][dtype], options.without
                )
                rows += found
                print("\n".join(lines_of(found)), flush=True)
                _write(options.out, facts, rows)  # what there is survives an interruption
    print("\n".join(summary_of(rows)))
    if rows:
        plot(rows, options.out / "bench.png")
    print(f"written: {options.out / 'bench.json'}, {options.out / 'bench.png'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    def words(kind: Callable[[str], Any], allowed: Any = None) -> Callable[[str], list[Any]]:
        def parse(text: str) -> list[Any]:
            values = [kind(word) for word in text.split(",") if word]
            for value in values:
                if (allowed is not None and value not in allowed) or (kind is int and value < 1):
                    raise argparse.ArgumentTypeError(f"{value!r} is none of {', '.join(map(str, allowed or WIDTHS))}")
            return values

        return parse

    parser = argparse.ArgumentParser(prog="bench-kernels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ops", type=words(str, OPS), default=list(OPS), help=",".join(OPS))
    parser.add_argument("--widths", type=words(int), default=list(WIDTHS))
    parser.add_argument("--dtypes", type=words(str, DTYPES), default=["bf16", "fp32"], help="bf16,fp32,fp16")
    parser.add_argument("--without", type=words(str), default=[], help="who to leave out, as in: torch.compile,liger")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="entries of one activation (default 2^28)")
    parser.add_argument("--calls", type=int, default=30, help="timed calls of each (default 30)")
    parser.add_argument("--out", type=Path, default=Path("reports/kernels"))
    return parser


def measure(
    op: str, width: int, dtype: str, device: Any, elements: int, calls: int, copy: float, without: Sequence[str] = ()
) -> list[Row]:
    """Returns the measurements of one operation at one width, of everyone who has it."""
    import torch

    from tests.bench_rivals import rivals

    height = max(1, elements // width)
    rows = []
    for who, call in rivals(op, without).items():
        timed: dict[str, float] = {}
        try:
            for way, ms in time_ways(op, call, height, width, dtype, device, calls):
                timed[way] = ms
        except Exception as error:  # another's kernel may refuse a width: that is a result, and so is its forward pass
            said = (str(error).strip() or type(error).__name__).splitlines()[0][:100]
            print(f"{op} {dtype} d={width} {who}: failed: {said}", flush=True)
        finally:
            torch._dynamo.reset()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        for way, ms in timed.items():
            gb_s = PASSES[op, way] * height * width * DTYPES[dtype] / ms / 1e6
            target = target_of(op, way, width) if who == OURS else None
            rows.append(Row(op, way, dtype, width, height, who, ms, gb_s, gb_s / copy, target))
    return rows


def time_ways(
    op: str, call: Callable[..., Any], height: int, width: int, dtype: str, device: Any, calls: int
) -> Iterator[tuple[str, float]]:
    """Yields the median milliseconds of a forward and of a backward call, or of one site of a stack, as measured."""
    import torch
    from torch._functorch import config as functorch

    functorch.donated_buffer = False  # a compiled backward pass is called many times here, and is to keep its buffers
    kind = _dtype(dtype)
    generator = torch.Generator(device).manual_seed(0)

    def activation() -> Any:
        x = torch.empty(height, width, dtype=kind, device=device)
        return x.normal_(generator=generator)

    def weights() -> tuple[Any, Any, Any]:
        gamma, bias = torch.ones(width, device=device), torch.zeros(width, device=device)
        return gamma.requires_grad_(), bias.requires_grad_(), torch.tensor(ALPHA, device=device)

    gamma, bias, alpha = weights()
    if op == "stack":
        start = activation().requires_grad_()
        branches = [activation().requires_grad_() for _ in range(SITES)]
        upstream = [activation() for _ in range(SITES)]
        wanted = [start, *branches, gamma, bias]

        def site(i: int) -> None:
            results = call(start, branches, alpha, gamma, bias)
            torch.autograd.grad(results, wanted, upstream)

        yield "both", timed(site, device, calls) / SITES
        return
    two = op.startswith("add_") or op == "deepnorm"
    sets = [[activation().requires_grad_() for _ in range(1 + two)] for _ in range(SETS)]
    outs = 2 if op.startswith("add_") else 1
    grads = [[activation() for _ in range(outs)] for _ in range(SETS)]
    with torch.no_grad():
        forward = timed(lambda i: call(*sets[i % SETS], alpha, gamma, bias), device, calls)
    yield "forward", forward
    kept = [call(*inputs, alpha, gamma, bias) for inputs in sets]
    trained = [gamma] if op.endswith("rmsnorm") else [gamma, bias]

    def backward(i: int) -> None:
        at = i % SETS
        torch.autograd.grad(kept[at], [*sets[at], *trained], grads[at], retain_graph=True)

    yield "backward", timed(backward, device, calls)


def timed(call: Callable[[int], Any], device: Any, calls: int) -> float:
    """Returns the median milliseconds of `call(i)` on the device."""
    import torch

    for i in range(SETS + 2):  # compiles, and what a library tunes
        call(i)
    if device.type != "cuda":
        spent = []
        for i in range(calls):
            started = time.perf_counter()
            call(i)
            spent.append(1e3 * (time.perf_counter() - started))
        return statistics.median(spent)
    torch.cuda.synchronize()
    started = time.perf_counter()
    call(0)
    host_s = time.perf_counter() - started  # without waiting: what the host needs to say what is to be done
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    torch.cuda._sleep(int(min(2.0, 2 * calls * host_s) * 2e9))  # cycles: the device waits until the host is ahead
    for i, (before, after) in enumerate(events):
        before.record()
        call(i)
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events)


def copy_rate(device: Any, dtype: str, elements: int, calls: int) -> float:
    """Returns the GB/s of copying one activation to another: bytes read and written."""
    import torch

    sets = [[torch.ones(elements, dtype=_dtype(dtype), device=device) for _ in range(2)] for _ in range(SETS)]
    ms = timed(lambda i: sets[i % SETS][0].copy_(sets[i % SETS][1]), device, calls)
    return 2 * elements * DTYPES[dtype] / ms / 1e6


def versions() -> dict[str, str]:
    """Returns the versions of everything that is measured and installed."""
    from importlib import metadata

    found = {}
    for package in ("torch", "triton", "liger-kernel", "flash-attn", "apex", "quack-kernels"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def lines_of(rows: Sequence[Row]) -> list[str]:
    """Returns one line a way: everyone's GB/s and share of the copy."""
    lines = []
    for way in dict.fromkeys(row.way for row in rows):
        shown = []
        for row in (r for r in rows if r.way == way):
            mark = "" if row.target is None else (" ok" if row.share >= row.target else f" < {100 * row.target:.0f} %")
            shown.append(f"{row.who} {row.gb_s:.0f} ({100 * row.share:.0f} %{mark})")
        first = rows[0]
        lines.append(f"{first.op:<14} {way:<8} {first.dtype} d={first.width:<6} GB/s: {', '.join(shown)}")
    return lines


def summary_of(rows: Sequence[Row]) -> list[str]:
    """Returns how many targets are met, and how many times faster than others a site of a stack is."""
    held = [row for row in rows if row.target is not None]
    lines = []
    if held:
        lines.append(f"targets met: {sum(row.share >= row.target for row in held if row.target)} of {len(held)}")
    for dtype, width in dict.fromkeys((row.dtype, row.width) for row in rows if row.op == "stack"):
        ms = {row.who: row.ms for row in rows if (row.op, row.dtype, row.width) == ("stack", dtype, width)}
        if OURS in ms:
            ratios = ", ".join(f"{who} {ms[who] / ms[OURS]:.2f}" for who in ms if who != OURS)
            lines.append(
                f"a DeepNorm site, forward and backward, {dtype} d={width}: {ms[OURS]:.3f} ms; times: {ratios}"
            )
    paired: dict[tuple[str, str, str, int], dict[str, float]] = {}
    for row in rows:
        paired.setdefault((row.op, row.way, row.dtype, row.width), {})[row.who] = row.ms
    for (op, way, dtype, width), by in paired.items():
        if OURS in by and OURS_STATISTICS in by:
            cost = 100 * (by[OURS_STATISTICS] / by[OURS] - 1)
            lines.append(f"statistics, {op} {way} {dtype} d={width}: {cost:+.1f} %")
    return lines


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws the share of the copy over width, one panel an operation and way, one line a library."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((row.op, row.way, row.dtype) for row in rows))
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    figure, axes = pyplot.subplots(down, across, figsize=(4 * across, 3 * down), squeeze=False, sharey=True)
    names = list(dict.fromkeys(row.who for row in rows))
    for axis, panel in zip(axes.flat, panels, strict=False):
        for place, who in enumerate(names):
            line = [row for row in rows if (row.op, row.way, row.dtype) == panel and row.who == who]
            label = {"marker": "o", "markersize": 3, "color": f"C{place}", "label": who}
            axis.plot([r.width for r in line], [100 * r.share for r in line], **label)
        axis.set_xscale("log", base=2)
        axis.set_title(" ".join(panel), fontsize=9)
        axis.set_ylim(0, 110)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("% of the device copy")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(names), fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _write(folder: Path, facts: dict[str, Any], rows: Sequence[Row]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1)
    (folder / "bench.json").write_text(text, encoding="utf-8")


def _fits(device: Any) -> int:
    """Returns the entries of an activation, in fp32, of which forty fit into the free memory."""
    import torch

    return int(torch.cuda.mem_get_info(device)[0] // (40 * 4))


def _dtype(name: str) -> Any:
    import torch

    return {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[name]


if __name__ == "__main__":
    sys.exit(main())
