"""What the hosts of a cluster hang on: a network namespace with a bridge, a mount namespace with the shared disk.

Started as `python -E -S rack.py PARENT DISK [FOLDER]`. It says `ready`, waits for the end of its standard input or of
its parent; then it removes FOLDER, so that nothing is left of a cluster whose owner was killed.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

import namespaces as ns


def main(parent: int, disk: str, folder: str | None = None) -> None:
    """Becomes the rack."""
    signal.signal(signal.SIGTERM, lambda number, frame: end(disk, folder))
    ns.die_with(parent, signal.SIGTERM)
    ns.unshare(ns.NEWNET | ns.NEWNS)
    ns.private_mounts()
    ns.mount("disk", disk, "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, "mode=755,size=256m")
    print("ready", flush=True)
    while os.read(0, 1):
        pass
    end(disk, folder)


def end(disk: str, folder: str | None) -> NoReturn:
    """Removes the folder and ends; a signal that comes just now does the same."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(OSError):
        ns.unmount(disk)
    for _ in range(20 * bool(folder)):  # what dies at the same moment may still write there
        shutil.rmtree(folder or "", ignore_errors=True)
        if not os.path.exists(folder or ""):
            break
        time.sleep(0.05)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
