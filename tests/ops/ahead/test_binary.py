"""The inspection of compiled kernels sees the faults it looks for: small kernels that have them, compiled for sm_90."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
PROGRAM = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tests.ops.ahead.binary import *

@triton.jit
def kernel(x_ptr, y_ptr, sum_ptr, x_row_stride, N: tl.constexpr, WIDE: tl.constexpr, FAULT: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    cols = tl.arange(0, N)
    x = tl.load(x_ptr + row * x_row_stride + cols).to(tl.float32)
    if FAULT == "atomic":
        tl.atomic_add(sum_ptr, tl.sum(x, axis=0))
    if FAULT == "double":
        x = (x.to(tl.float64) * 1.0000001).to(tl.float32)
    if FAULT == "twice":
        x += tl.load(x_ptr + row * x_row_stride + N - 1 - cols).to(tl.float32)
    if FAULT == "spill":
        x = x - tl.sum(x, axis=0)  # 512 numbers a thread, held across the sum
    tl.store(y_ptr + row * N + cols, x.to(tl.bfloat16))

def build(n, wide, fault, warps=4):
    signature = {"x_ptr": "*bf16", "y_ptr": "*bf16", "sum_ptr": "*fp32", "x_row_stride": "i32"}
    signature |= {"N": "constexpr", "WIDE": "constexpr", "FAULT": "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(kernel, signature, {"N": n, "WIDE": wide, "FAULT": fault}, aligned)
    return triton.compile(source, target=TARGET, options={"num_warps": warps})

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = ("x_ptr", "y_ptr")
NAMES = ["x_ptr", "y_ptr", "sum_ptr", "x_row_stride"]
def widths(k):
    return sorted((a.argument, a.kind, a.bits) for a in ptx_accesses(k.asm["ptx"], NAMES))
sound = build(1024, True, "")
assert widths(sound) == [("x_ptr", "load", 128), ("y_ptr", "store", 128)], widths(sound)
assert resources(sound, TARGET).spilled == 0
assert not has_atomics(sound) and not has_fp64(sound)
assert not narrow_row_multiplies(sound.asm["ttir"], 1024, POINTERS) and wide_row_multiplies(sound.asm["ttir"])
narrow = build(1024, False, "")
assert len(narrow_row_multiplies(narrow.asm["ttir"], 1024, POINTERS)) == 2  # by an argument, and by a constant
assert has_atomics(build(1024, True, "atomic"))
assert has_fp64(build(1024, True, "double"))
assert sum(a[0] == "x_ptr" for a in widths(build(1024, True, "twice"))) > 1
assert set(a[2] for a in widths(build(1024, True, "", 8))) == {64}  # 8 warps leave 4 numbers a thread
assert resources(build(16384, True, "spill", 1), TARGET).spilled > 0
"""


@pytest.mark.timeout(200)
def test_faults_are_seen(tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # Triton reads a kernel's source from its file
    program.write_text(PROGRAM)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(program)], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
