"""Small file manners that the spool and the sink share: locks that vanish with their process, whole-file writes."""

import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def try_lock(path: Path) -> int | None:
    """Returns a descriptor that holds an exclusive lock on `path`, or None when another holder lives.

    The lock lasts until the descriptor is closed or the process is gone, however it went.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked(path: Path, wait_s: float) -> Iterator[None]:
    """Holds the lock on `path` for the block.

    Raises:
        TimeoutError: another process held it for longer than `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    while (descriptor := try_lock(path)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was held by another process for more than {wait_s:.0f} s")
        time.sleep(0.05)
    try:
        yield
    finally:
        os.close(descriptor)


def read_regular(path: Path) -> bytes:
    """Returns the bytes of a file.

    Raises:
        OSError: it cannot be read, or is a pipe or a device, which might never come to an end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for a writer
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def write_whole(path: Path, text: str) -> None:
    """Writes `text` so that a reader sees the old file or the new one, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
