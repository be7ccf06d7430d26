"""A real PostgreSQL of one's own, as Debian packages it: in a temporary folder, on a free port of loopback."""

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.tracking.serving import free_port


def _lacks(what: str) -> NoReturn:
    """Skips, but where the tests must be complete, fails."""
    if os.environ.get("CI") == "true" and os.geteuid() == 0:
        pytest.fail(f"{what}, and CI=true asks for all tests")
    pytest.skip(what)


def _programs() -> Path:
    """Returns the folder of initdb and postgres, the newest of several versions."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    if not found and (other := shutil.which("initdb")) is not None:
        found = [Path(other)]
    if not found:
        _lacks("needs PostgreSQL (apt-get install --no-install-recommends postgresql)")
    return found[-1].parent


def _user(folder: Path) -> dict[str, Any]:
    """Returns whom to run as, and hands the folder over: PostgreSQL refuses to be root."""
    if os.geteuid() != 0:
        return {}
    try:
        other = pwd.getpwnam("postgres")
    except KeyError:
        _lacks("needs a user postgres, being root")
    for path in (folder, *folder.iterdir()):
        os.chown(path, other.pw_uid, other.pw_gid)
    return {"user": other.pw_uid, "group": other.pw_gid, "extra_groups": []}


@contextmanager
def postgres() -> Iterator[tuple[str, str]]:
    """Gives the address of an empty database, without its password, and the password; ends the server after."""
    programs = _programs()
    try:
        import psycopg2
    except ImportError:
        _lacks("needs psycopg2 (pip install 'normscale[postgres]')")
    folder = Path(tempfile.mkdtemp(prefix="normscale-postgres-"))  # the path of a socket must be short
    process: subprocess.Popen[bytes] | None = None
    try:
        password, port, log = secrets.token_hex(8), free_port(), folder / "log"
        (folder / "password").write_text(password)
        user = _user(folder)
        initdb = [programs / "initdb", "--username=normscale", "--auth=scram-sha-256", "--no-sync"]
        initdb += [f"--pwfile={folder}/password", f"--pgdata={folder}/data"]
        made = subprocess.run(initdb, capture_output=True, text=True, cwd=folder, **user)
        assert made.returncode == 0, made.stderr
        settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": folder, "fsync": "off"}
        command = [
            programs / "postgres",
            "-D",
            folder / "data",
            *(f"--{key}={value}" for key, value in settings.items()),
        ]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder, **user)
        uri = f"postgresql://normscale@127.0.0.1:{port}/postgres"
        deadline = time.monotonic() + 30
        while True:
            try:
                psycopg2.connect(uri, password=password).close()
                break
            except psycopg2.OperationalError:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield uri, password
    finally:
        if process is not None:
            process.send_signal(signal.SIGINT)  # it cuts the connections that are left
            process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)
