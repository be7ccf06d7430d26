"""The system calls that hosts are made of. Standard library alone: its users start as `python -E -S`, in 20 ms."""

import ctypes
import os
import signal
import sys

NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
ALL = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Moves this process (for NEWPID, its children) into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def enter(pid: int, flags: int) -> None:
    """Moves this process (for NEWPID, its children) into the namespaces of another."""
    held = os.pidfd_open(pid)
    try:
        _check(_libc.setns(held, flags), f"setns to {pid}")
    finally:
        os.close(held)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mounts as mount(2) does."""
    words = [word.encode() if word else None for word in (source, target, kind)]
    _check(_libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None), f"mount {source} on {target}")


def unmount(target: str) -> None:
    """Unmounts what was mounted last, at once for those who look it up from now on."""
    MNT_DETACH = 2
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Makes this process get a signal when its parent (0: one outside of its pid namespace) ends, however it does."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os._exit(1)  # it was gone before


def private_mounts() -> None:
    """Keeps what this mount namespace mounts from now on to itself."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def try_all() -> None:
    """Makes all namespaces that a host needs, once, and leaves them; raises OSError where that is not allowed."""
    unshare(ALL)
    private_mounts()
    if (pid := os.fork()) == 0:
        try:
            mount("proc", "/proc", "proc")
            mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
        except OSError as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise OSError("a mount in the new namespaces failed")


if __name__ == "__main__":
    try:
        try_all()
    except OSError as error:
        sys.exit(str(error))
