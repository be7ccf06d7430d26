"""What the parts of a cluster share."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]  # of the checkout
PYTHON = (sys.executable, "-E", "-S")  # starts in 20 ms
PATIENCE = float(os.environ.get("PATIENCE", "2"))  # what limits, which are those of an idle machine, are multiplied by


def wait_until(true: Callable[[], object], limit_s: float, every_s: float = 0.05) -> bool:
    """Waits for something to become true, and returns whether it did in time."""
    deadline = time.monotonic() + limit_s * PATIENCE
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def bare_environment(**more: str) -> dict[str, str]:
    """Returns the environment of someone who has just logged in on a host."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    own = {"HOME": os.path.expanduser("~"), "PATH": path, "LANG": "C.UTF-8", "USER": "root", "SHELL": "/bin/bash"}
    return own | more
