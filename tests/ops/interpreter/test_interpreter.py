"""The Triton kernels against fp64: in Triton's interpreter, which needs no GPU, and on a GPU where there is one.

The interpreter is chosen when `@triton.jit` runs, so its tests have a process of their own. What is tested stands in
the `case_*.py` files beside this one; on a machine with a GPU the same files run compiled, with a GPU's bounds.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# Each shard is a process; they are of about equal length, so that two workers share them.
SHARDS = {
    "values": ["case_values.py"],
    "inputs": ["case_rows.py", "case_layouts.py", "case_reports.py"],
    "use": ["case_dropout.py", "case_statistics.py", "case_handle.py", "case_handle_uses.py", "case_torch.py"],
    "models": ["case_models.py"],
}


def why_not() -> str | None:
    """Returns why the interpreter cannot run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    triton = tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))
    numpy = tuple(map(int, importlib.metadata.version("numpy").split(".")[:2]))
    if triton < (3, 7) and numpy >= (2, 4):
        return f"the interpreter of Triton {triton[0]}.{triton[1]} needs numpy before 2.4"
    return None


def run_cases(files: list[str], *, interpreted: bool, root: Path = ROOT, more: tuple[str, ...] = ()) -> str:
    """Runs case files in a process of their own; returns "" if they pass, else the end of what was printed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_INTERPRET"))}
    env |= {"PYTHONPATH": str(root)} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *more]
    command += [str(root / HERE.relative_to(ROOT) / file) for file in files]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-6000:] or f"exit code {done.returncode}"


def test_every_case_file_is_in_a_shard() -> None:
    assert {path.name for path in HERE.glob("case_*.py")} == {file for files in SHARDS.values() for file in files}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shard", SHARDS)
def test_kernels_in_the_interpreter(shard: str) -> None:
    if reason := why_not():
        pytest.skip(reason)
    failed = run_cases(SHARDS[shard], interpreted=True)
    assert not failed, failed


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shard", SHARDS)
def test_kernels_on_the_gpu(shard: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    failed = run_cases(SHARDS[shard], interpreted=False)
    assert not failed, failed
