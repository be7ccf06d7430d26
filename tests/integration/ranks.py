"""What tests with several ranks share."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_two(
    worker: str, *words: str, timeout: float = 100, package: str = "tests.integration", code: int = 0
) -> list[str]:
    """Runs `python -m <package>.<worker> words` as two ranks of this machine, to an end with this code.

    Returns what each wrote to standard error.
    """
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", f"{package}.{worker}", *words],
            cwd=ROOT,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [code, code], errors
    return errors
