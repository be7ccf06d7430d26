"""What tests with several ranks share."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]


def run_two(
    worker: str, *words: str, timeout: float = 100, package: str = "tests.integration", code: int = 0
) -> list[str]:
    """Runs what `python -m <package>.<worker> words` does as two ranks of this machine, to an end with this code.

    Returns what each wrote to standard error.
    """
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    with TemporaryDirectory(prefix="normscale-ranks-") as folder:
        ranks = []
        for rank in range(2):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"}
            errors = Path(folder) / f"rank{rank}.err"
            errors.touch()
            ranks.append(
                {
                    "module": f"{package}.{worker}",
                    "words": words,
                    "env": {**os.environ, **shared, **own},
                    "errors": str(errors),
                }
            )
        codes = _warm().run(ranks, timeout)
        said = [(Path(folder) / f"rank{rank}.err").read_text() for rank in range(2)]
    assert codes == [code, code], [codes or f"they did not end within {timeout:g} s", *said]
    return said


class _Warm:
    """The process that ranks are forked from (see `warm`); it ends with this one."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.integration.warm", str(theirs.fileno())]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=[theirs.fileno()])
        theirs.close()
        self.socket, self.lines = ours, ours.makefile("rw", encoding="utf-8")

    def run(self, ranks: list[dict[str, Any]], timeout: float) -> list[int]:
        """Returns the exit codes of ranks, none if they have not all ended in time; no rank is left behind."""
        pids: list[int] = []
        codes: list[int] = []
        try:
            print(json.dumps(ranks), file=self.lines, flush=True)
            pids = json.loads(self.lines.readline())
            self.socket.settimeout(timeout)
            with suppress(TimeoutError):
                codes = json.loads(self.lines.readline())
                self.socket.settimeout(None)
        finally:
            if not codes:  # what was cut off amid an answer is of no further use
                self.process.kill()
                self.process.wait()
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                _WARM.clear()
        return codes


_WARM: list[_Warm] = []


def _warm() -> _Warm:
    if not _WARM:
        _WARM.append(_Warm())
    return _WARM[0]
