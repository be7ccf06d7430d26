"""Rows that lie more than 2^31 elements apart, in memory that is never touched and so never taken.

An untouched tensor of 2^32 elements is address space only; three rows of it are written. With a 32-bit product of row
and stride the kernel reads elsewhere and the process usually dies, so each test has a process of its own. Results are
contiguous, so their 64-bit addresses are seen in the compiled kernels only (`ahead/`).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.interpreter.test_interpreter import why_not

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
from tests.ops.compare import run
from tests.ops.inputs import problem
from tests.ops.oracle import Problem

WIDTH = {width}
SPAN = {span}

def far(value):
    # Rows that begin 2^31 - 64 (or more) elements apart; the last one ends beyond 2^32.
    base = torch.empty(2 * SPAN + WIDTH, dtype=value.dtype)
    rows = base.as_strided(value.shape, (SPAN, 1))
    rows.copy_(value)
    return rows

for kind in ("layernorm", "rmsnorm")[: 1 if WIDTH > 9000 else 2]:  # the widest has kernels of its own in one kind only
    for op in ("norm", "add_norm", "residual_norm")[2 if WIDTH > 9000 else 0 :]:
        near = problem(op, kind, (3, WIDTH), torch.bfloat16)
        want = run(near)
        names = [n for n in ("x", "residual", "dy", "dz") if getattr(near, n) is not None]
        got = run(problem(op, kind, (3, WIDTH), torch.bfloat16, **{{n: far(getattr(near, n)) for n in names}}))
        for name, value in want.items():
            assert torch.equal(got[name], value), (op, kind, name)
print("equal")
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("width", "span"), [(64, 2**31 - 64), (1000, 2**31), (16384, 2**31 + 8)])
def test_rows_more_than_2_to_the_31_elements_apart(tmp_path: Path, width: int, span: int) -> None:
    if reason := why_not():
        pytest.skip(reason)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(width=width, span=span))
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(program)], cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode and "DefaultCPUAllocator" in done.stderr:
        pytest.skip("this machine does not hand out address space without memory behind it")
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-2000:]}"
