"""The first process of a host. Started as `python -E -S host.py PARENT`, in the rack's mount namespace.

The host is told what to be by one line of JSON on standard input. Its first line of output is the number of the host's
first process as seen from outside; when the line `plugged` has come, it sets up its network and mounts, starts sshd,
and says `ready`. From then on it only buries the dead. Whoever kills it has cut the power.
"""

import json
import os
import pwd
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import namespaces as ns


def main(parent: int) -> None:
    """Makes the namespaces, and waits for the end of the process that lives in them."""
    ns.die_with(parent)
    orders = json.loads(sys.stdin.readline())
    ns.unshare(ns.ALL)
    ns.private_mounts()
    pid = os.fork()
    if pid == 0:
        try:
            live(orders)
        except BaseException as error:
            print(f"failed: {type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(1)
    print(pid, flush=True)
    os.waitpid(pid, 0)


def live(orders: dict) -> None:  # type: ignore[type-arg]
    """Is the first process of the host, to its end."""
    ns.die_with(0)
    if sys.stdin.readline() != "plugged\n":
        return
    socket.sethostname(orders["name"])
    for command in (
        ("link", "set", "lo", "up"),
        ("address", "add", f"{orders['address']}/24", "dev", "eth0"),
        ("link", "set", "eth0", "up"),
    ):
        subprocess.run(["ip", *command], check=True)
    mount_all(orders)
    sshd = [orders["sshd"], "-D", "-e", "-f", "/etc/ssh/sshd_config"]
    with open(f"{orders['log']}/{orders['name']}.sshd.log", "ab") as log:
        subprocess.Popen(sshd, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    wait_for(22)
    print("ready", flush=True)
    bury()


def mount_all(orders: dict) -> None:  # type: ignore[type-arg]
    """Gives the host what must be its own; what is left is shared with all hosts, as by NFS."""
    ns.mount("proc", "/proc", "proc")
    held = [(path, os.open(path, os.O_PATH)) for path in sorted(orders["keep"])]  # before they are covered
    for source, target in orders["over"].items():
        if os.path.exists(target):
            ns.mount(source, target, "", ns.MS_BIND)
    for target, mode in (("/tmp", 1777), ("/dev/shm", 1777), ("/run", 755)):
        ns.mount("tmpfs", target, "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, f"mode={mode},size=2g")
    for folder in ("/run/sshd", "/run/lock", "/run/user"):
        os.mkdir(folder, 0o755)
    for path, handle in held:
        os.makedirs(path, exist_ok=True)
        ns.mount(f"/proc/self/fd/{handle}", path, "", ns.MS_BIND | ns.MS_REC)
        os.close(handle)
    own = Path(pwd.getpwuid(0).pw_dir, ".ssh")
    if own.is_dir():  # neither read for keys nor written
        ns.mount("tmpfs", str(own), "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, "mode=700,size=1m")


def wait_for(port: int, limit_s: float = 10.0) -> None:
    """Waits until something listens; a trial connection would leave a process of sshd behind for a while."""
    LISTEN = "0A"
    deadline = time.monotonic() + limit_s
    while True:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        if any(int(row[1].rpartition(":")[2], 16) == port and row[3] == LISTEN for row in rows):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens at port {port} after {limit_s:g} s")
        time.sleep(0.01)


def bury() -> None:
    """Reaps what ends, until standard input does."""
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    events = selectors.DefaultSelector()
    events.register(wake, selectors.EVENT_READ)
    events.register(0, selectors.EVENT_READ)
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        for key, _ in events.select():
            if not os.read(key.fd, 512) and key.fd == 0:
                return


if __name__ == "__main__":
    main(int(sys.argv[1]))
