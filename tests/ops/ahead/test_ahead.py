"""The kernels compiled for sm_80, sm_90, sm_100 and gfx942 without a GPU; what is held stands in `compile.py`.

A process of its own, since Triton either interprets or compiles in one. `make test-kernels-full` compiles every form,
width and dtype for every target.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHARDS = 2  # two workers share them


def compiled(*arguments: str) -> str:
    """Runs the compile suite; returns "" if it is content, else what it says."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.ops.ahead.compile", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-8000:] or f"exit code {done.returncode}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_kernels_compile_as_they_should(shard: int) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    said = compiled(str(shard), str(SHARDS))
    assert not said, said
