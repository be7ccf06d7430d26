"""What `launch doctor` asks of a host. It is sent there as text, so it needs Python's own library alone, 3.8 or newer.

Each line on stdin is a question, {"do": name, ...}; each answer is a line on stdout that begins with MARK, since a
login shell may print there, too.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

MARK = "normscale-doctor "
_LISTENING: list[tuple[socket.socket, threading.Thread]] = []


def facts(packages: list[str]) -> dict[str, Any]:
    """Returns what the hosts are compared by."""
    return {
        "host": socket.gethostname(),
        "boot": _read("/proc/sys/kernel/random/boot_id").strip(),
        "python": platform.python_version(),
        "packages": versions(packages),
        "code": sources(os.getcwd()),
        "commit": commit(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _memory(),
        "gpus": gpus(),
        "shm": _space("/dev/shm"),
        "limits": {name: _limit(name) for name in ("NOFILE", "NPROC", "MEMLOCK")},
        "infiniband": os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband")),
    }


def versions(packages: list[str]) -> dict[str, str | None]:
    """Returns {package: version, or None where it is not installed}."""
    from importlib import metadata

    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def sources(folder: str) -> str | None:
    """Returns a hash of the Python files of normscale and its launchers; None where there are none."""
    digest, seen = hashlib.sha256(), False
    for package in ("normscale", "launch"):
        for root, folders, names in os.walk(os.path.join(folder, package)):
            folders.sort()
            for name in sorted(names):
                if name.endswith(".py"):
                    path, seen = os.path.join(root, name), True
                    digest.update(os.path.relpath(path, folder).encode() + b"\0")
                    with open(path, "rb") as file:
                        digest.update(file.read() + b"\0")
    return digest.hexdigest()[:10] if seen else None


def commit() -> str | None:
    """Returns the checkout's commit, with "+" where files differ from it; None outside of one, or without git."""

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5)
        return done.stdout.decode().strip() if done.returncode == 0 else None

    try:
        short = git("rev-parse", "--short", "HEAD")
        return short and short + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.TimeoutExpired):
        return None


def gpus() -> list[dict[str, Any]]:
    """Returns the GPUs as the driver has them: {"name": ..., "bytes": ...} each."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=8)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.rpartition(",") for line in done.stdout.decode(errors="replace").splitlines() if "," in line]
    return [{"name": name.strip(), "bytes": int(size) << 20} for name, _, size in rows if size.strip().isdigit()]


def paths(wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what there is of each {"key", "path", "write"}: why it cannot be used, its size, its file system."""
    return [dict(_path(one["path"], one["write"]), **one) for one in wanted]


def _path(path: str, write: bool) -> dict[str, Any]:
    path = os.path.abspath(os.path.expanduser(path))
    if not write:
        try:
            if os.path.isdir(path):
                names = sorted(os.listdir(path))
                return {"wrong": None, "bytes": sum(os.path.getsize(os.path.join(path, name)) for name in names)}
            with open(path, "rb") as file:
                file.read(1)
            return {"wrong": None, "bytes": os.path.getsize(path)}
        except OSError as error:
            return {"wrong": error.strerror, "bytes": None}
    place = nearest(path)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return {"wrong": f"{place} cannot be written ({error.strerror})", "free": None}
    return {"wrong": None, "free": (_space(place) or {}).get("free")}


def nearest(path: str) -> str:
    """Returns the folder, or the nearest one above it that is there."""
    path = os.path.abspath(os.path.expanduser(path))
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def leave(path: str, token: str) -> bool:
    """Leaves a file that other hosts look for."""
    with open(os.path.join(nearest(path), token), "wb"):
        pass
    return True


def sees(path: str, token: str) -> bool:
    """Returns whether the file is here, too."""
    place = nearest(path)
    os.listdir(place)  # a client of NFS looks anew
    return os.path.exists(os.path.join(place, token))


def remove(path: str, token: str) -> bool:
    """Removes it again."""
    os.unlink(os.path.join(nearest(path), token))
    return True


def names(hosts: list[str]) -> dict[str, list[str]]:
    """Returns {host: its addresses, [] where the name is not known here}; the own name is there, too."""
    wanted = [*hosts, socket.gethostname()]
    with concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
        return dict(zip(wanted, pool.map(_addresses, wanted)))  # noqa: B905 (of Python 3.10)


def _addresses(name: str) -> list[str]:
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError):
        return []


def listen() -> dict[str, Any]:
    """Listens at a free port until `silence`; returns {"port"} or {"wrong"}."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # or a connection closed here keeps the port a minute
    try:
        server.bind(("", 0))
        server.listen(64)
    except OSError as error:
        server.close()
        return {"wrong": error.strerror}
    thread = threading.Thread(target=_accept, args=(server,), daemon=True)
    thread.start()
    _LISTENING.append((server, thread))
    return {"port": server.getsockname()[1]}


def _accept(server: socket.socket) -> None:
    while True:
        try:
            server.accept()[0].close()
        except OSError:
            return


def silence() -> bool:
    """Listens no more."""
    while _LISTENING:
        server, thread = _LISTENING.pop()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # a thread that waits in accept would keep the port
        thread.join(1)
        server.close()
    return True


def free(port: int) -> dict[str, Any]:
    """Returns {"port"} if it can be had, or for 0 a free one, or {"wrong"}."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError as error:
            return {"wrong": error.strerror}
        return {"port": server.getsockname()[1]}


def connect(others: list[tuple[str, int]], limit_s: float) -> dict[str, str]:
    """Returns {host: why it cannot be connected to} of the [host, port] that cannot."""

    def attempt(other: tuple[str, int]) -> str | None:
        try:
            socket.create_connection(other, timeout=limit_s).close()
        except socket.gaierror:
            return None  # an unknown name is told as such
        except OSError as error:
            return "timed out" if isinstance(error, socket.timeout) else error.strerror or str(error)
        return None

    with concurrent.futures.ThreadPoolExecutor(max(1, len(others))) as pool:
        failed = pool.map(attempt, [(name, port) for name, port in others])
        return {other[0]: why for other, why in zip(others, failed) if why}  # noqa: B905


def rank(source: str, settings: dict[str, Any], environ: dict[str, str], limit_s: float) -> dict[str, Any]:
    """Runs the source as a process of its own and returns the last line that it prints, as JSON, or {"wrong"}."""
    words = [sys.executable, "-c", source, json.dumps(settings)]
    env = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(words, env=env, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"wrong": f"no answer within {limit_s:g} s"}
    said = done.stdout.decode(errors="replace").strip().splitlines()
    if done.returncode == 0 and said:
        result: dict[str, Any] = json.loads(said[-1])
        return result
    errors = done.stderr.decode(errors="replace").strip().splitlines()
    return {"wrong": errors[-1][:200] if errors else f"exit code {done.returncode}"}


def clock() -> float:
    """Returns the time here."""
    return time.time()


def _space(path: str) -> dict[str, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return {"all": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}


def _memory() -> int | None:
    rows = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    return int(rows["MemTotal"].split()[0]) << 10 if "MemTotal" in rows else None


def _limit(name: str) -> int | None:
    soft = resource.getrlimit(getattr(resource, "RLIMIT_" + name))[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def main() -> None:
    """Answers until stdin ends."""
    known = (facts, paths, leave, sees, remove, names, listen, silence, connect, free, rank, clock)
    questions: dict[str, Any] = {f.__name__: f for f in known}
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        try:
            answer = {"answer": questions[asked.pop("do")](**asked)}
        except Exception as error:  # it is told, and the next question is answered
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(MARK + json.dumps(answer), flush=True)


if __name__ in ("__main__", "doctor_host"):
    main()
