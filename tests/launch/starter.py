"""Stands in for torchrun where only its manners count: starts a rank, ends it when told, names how it failed."""

import os
import signal
import subprocess
import sys
import time

process = subprocess.Popen([sys.executable, *sys.argv[1:]], env=os.environ)
deadline = float("inf")


def end(*_: object) -> None:
    global deadline
    deadline = time.monotonic() + 1.0  # torchrun waits 30 s
    process.terminate()


signal.signal(signal.SIGTERM, end)
while (code := process.poll()) is None:
    time.sleep(0.02)
    if time.monotonic() > deadline:
        process.kill()
if code:
    place = "E1129 16:22:31.176000 7179 x/torch/distributed/elastic/multiprocessing/api.py:1002]"
    print(f"{place} failed (exitcode: {code}) local_rank: 0 (pid: 7) of binary: p", file=sys.stderr)
sys.exit(1 if code else 0)
