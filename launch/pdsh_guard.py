"""What DeepSpeed's launcher runs under the name of pdsh: pdsh itself, which ends when our launcher does.

pdsh does not look at its standard input, so that it would not notice. And when it is told to stop, DeepSpeed's launcher
has pdsh run `pkill -f` on every host, by a pattern that fits every other job of the same Python; that is left undone.
"""

import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.processes import adopt_orphans, descendants, die_with_parent, send

TICK_S = 0.5


def put_guard(folder: Path) -> Path:
    """Returns the folder, with a `pdsh` in it that is this module around the real one."""
    real = shutil.which("pdsh") or "pdsh"
    guard = folder / "pdsh"
    words = shlex.join([sys.executable, "-m", "launch.pdsh_guard", real])
    guard.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    guard.chmod(0o700)
    return folder


def main(argv: Sequence[str]) -> int:
    """Returns the exit code of pdsh."""
    if any(word.startswith("pkill") for word in argv):
        return 0
    adopt_orphans()
    pdsh = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent(),  # noqa: PLW1509 (no thread runs)
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _end())
    while pdsh.poll() is None:
        ready, _, _ = select.select([0], [], [], TICK_S)
        if ready and not os.read(0, 4096):
            _end()
            break
    code = pdsh.wait()
    return code if code >= 0 else 128 - code


def _end() -> None:
    """Kills pdsh and its connections; the ranks end with these."""
    for pid in descendants(os.getpid()):
        send(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
