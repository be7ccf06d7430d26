"""Compiles the kernels for GPUs that are not there, and says what is wrong with them.

`python -m tests.ops.ahead.compile SHARD SHARDS [--full] [--write]` compiles one share of the cases, prints a line a
fault and returns 1 if there is one. `--write` writes the golden file of this Triton version anew from all cases (make
golden-kernels), to be looked at in git diff.

What is held, for each kernel: no fp64, no atomics, 64-bit products of row and stride, every access of an activation as
often as the byte table says (loads and stores of a thread times threads, by the size of the tile) and 16 bytes wide
where the width allows; on sm_90 no spilled register but those of `SPILLED`. Registers, shared memory and
barriers equal the golden line.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from tests.ops.ahead.binary import (
    Access,
    amd_widths,
    has_atomics,
    has_fp64,
    narrow_row_multiplies,
    ptx_accesses,
    resources,
    wide_row_multiplies,
)
from tests.ops.ahead.matrix import ACTIVATIONS, DTYPES, Case, full, usual

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SPILLED = {  # bytes a thread that no tiling was found to avoid: 8, 16 and 32 warps, with and without a bound
    "sm_90 add_norm measured layernorm bf16 16384 forward": 40,
    "sm_90 add_norm measured layernorm fp32 16384 forward": 48,
}
GOLDEN = Path(__file__).parents[2] / "golden"


def golden_file() -> Path:
    """Returns the golden file of this Triton version: another version's compiler takes other registers."""
    return GOLDEN / f"kernels-triton-{triton.__version__}.txt"


@cache
def golden() -> dict[str, str]:
    """Returns the golden lines by kernel; none for a Triton version that nobody has written a file for."""
    if not golden_file().exists():
        return {}
    lines = (tuple(line.split(": ", 1)) for line in golden_file().read_text().splitlines() if not line.startswith("#"))
    return dict(lines)


def faults(case: Case) -> Iterator[tuple[str, str, list[str]]]:
    """Yields each kernel of a case: its name, its golden line, and what is wrong with it."""
    target = TARGETS[case.target]
    for name, call, table in case.calls():
        source, options = call.source(target)
        compiled = triton.compile(source, target=target, options=options)
        found = resources(compiled, target)
        wrong = []
        if has_fp64(compiled):
            wrong.append("fp64")
        if has_atomics(compiled):
            wrong.append("an atomic update")
        if case.target == "sm_90" and found.spilled > SPILLED.get(f"{case} {name}", 0):
            wrong.append(f"{found.spilled} bytes spilled")
        if name != "reduce":
            wrong += [f"32-bit row product {p}" for p in narrow_row_multiplies(
                compiled.asm["ttir"], case.width, ACTIVATIONS)]  # fmt: skip
            if not wide_row_multiplies(compiled.asm["ttir"]):
                wrong.append("no 64-bit row product")
        if target.backend == "cuda":
            arguments = [a for a, kind in source.signature.items() if kind != "constexpr"]
            accesses = ptx_accesses(compiled.asm["ptx"], arguments)
            wrong += _passes(case, call, accesses, table, 32 * options["num_warps"])
        elif table:  # addresses are not followed in AMD's assembler; every tile must still be moved by 16 bytes
            lines = sum(abs(v) for v in table.values())
            if amd_widths(compiled.asm["amdgcn"]).get(128, 0) < lines:
                wrong.append(f"accesses by width {amd_widths(compiled.asm['amdgcn'])}")
        yield f"{case} {name}", found.line(), wrong


def _passes(case: Case, call: Any, accesses: list[Access], table: dict[str, int], threads: int) -> Iterator[str]:
    """Yields where passes over the activation, or the width of an access, differ from what they should be."""
    size = torch.empty((), dtype=DTYPES[case.dtype]).element_size()
    moved: Counter[str] = Counter()
    for access in accesses:
        if access.argument.startswith("?"):
            yield f"an access through {access.argument} argument"
        if access.argument in ACTIVATIONS:
            moved[access.argument] += (1 if access.kind == "load" else -1) * access.bits // 8 * threads
    tile = call.arguments["BLOCK"] * call.arguments.get("ROWS", 1) * size
    passes = {name: count / tile for name, count in moved.items()}
    if passes != {name: float(count) for name, count in table.items()}:
        yield f"passes over the activation {passes}, not {table}"
    aligned = (case.width & -case.width) * size * 8  # the largest power of two that divides a row, in bits
    for access in set(accesses):
        if access.argument in ACTIVATIONS and access.bits != min(128, aligned):
            yield f"{access.argument}: {access.kind} of {access.bits} bits"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("shard", type=int, nargs="?", default=0)
    parser.add_argument("shards", type=int, nargs="?", default=1)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    cases = list(full() if options.full or options.write else usual())
    lines, count = {}, 0
    for case in cases[options.shard :: options.shards]:
        for name, line, wrong in faults(case):
            lines[name] = line
            if not options.write and golden().get(name, line) != line:
                wrong.append(f"now {line}; golden {golden()[name]}; meant? make golden-kernels")
            if not options.write and golden() and name not in golden():
                wrong.append("not in the golden file; make golden-kernels")
            count += len(wrong)
            for what in wrong:
                print(f"{name}: {what}", flush=True)
    if options.write:
        heading = f"# Triton {triton.__version__}: what each kernel takes. Written by make golden-kernels.\n"
        golden_file().write_text(heading + "".join(f"{name}: {line}\n" for name, line in sorted(lines.items())))
        print(f"{golden_file()}: {len(lines)} kernels")
    else:
        print(f"{len(lines)} kernels, {count} faults; {len(golden())} golden lines for Triton {triton.__version__}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
