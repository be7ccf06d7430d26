"""The MLflow server: `normscale ui` for this machine, `normscale server` shared by several. Imports no mlflow."""

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from normscale.arguments import stoppable, typed
from normscale.errors import StoreError
from normscale.tracking import server_names, server_store, sink_state
from normscale.tracking.address import SERVERS, SQLITE, database, resolve, without_password
from normscale.tracking.find import names_in, newest_first
from normscale.tracking.mlflow_pages import PENDING, run_path
from normscale.tracking.mlflow_store import QUIET
from normscale.tracking.sink_process import links, run_links, ui_words

SHARED_STORE = "sqlite:///server.db"  # not that of runs of this machine, whose files other machines could not write
_HERE = "127.0.0.1"
_NEWEST_RUNS = 5  # of no claim, that `ui` links to
_START_S = 120.0
_END_S = 10.0  # what a server may take to end by itself
_LINES = 15  # of what a server said that failed
_OTHER_VERSION = "Detected out-of-date database schema"
_UI_END = "?workflowType=machine_learning"  # without it a browser shows the tools for language-model applications
# An ambient setting must not open what the command line says is closed, or serve something else than it says.
_NOT_INHERITED = ("MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE", "MLFLOW_ARTIFACTS_ONLY", "MLFLOW_STATIC_PREFIX")


def server_command(
    uri: str, artifacts: Path, port: int, host: str = _HERE, served: Sequence[str] = (), extra: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Returns the command that serves a store, and the environment it needs.

    Args:
        uri: The store, as `resolve` returns it.
        artifacts: The folder for files that are logged through this server.
        port: The port.
        host: The address to listen on.
        served: The names beyond loopback's by which the server may be called.
        extra: Those of them that may belong to a proxy before it.
    """
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    command += ["--serve-artifacts", "--artifacts-destination", str(artifacts)]
    command += ["--allowed-hosts", ",".join(server_names.allowed_hosts(served, port))]
    if origins := server_names.allowed_origins(served, extra, port):
        command += ["--cors-allowed-origins", ",".join(origins)]
    command += ["--uvicorn-opts", "--log-level warning"]  # a line for every click would push the links away
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED} | QUIET
    # The address of the store may hold a password: by the environment it is in no list of processes.
    return command, environment | {
        server_store.VARIABLE: server_store.with_driver(uri),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def ui(uri: str, port: int, runs: Path | None = None) -> int:
    """Serves the UI of an SQLite store on loopback until interrupted; returns the server's exit code.

    Raises:
        StoreError: there is no such store yet, it is not a file here, or the port is taken.
    """
    uri = resolve(uri)
    path = database(uri)
    if uri.startswith(SERVERS):
        raise StoreError(f"tracking.uri: {uri} is a server already; open it in a browser")
    if path is None:
        raise StoreError(f"tracking.uri: {uri} is not a file here; {ui_words(uri)} serves it")
    if not path.is_file():
        raise StoreError(f"tracking.uri: {path} is not there yet; train something first, or run {typed('sync')}")
    _check_port(_HERE, port, "ui")
    command, environment = server_command(uri, server_store.artifacts_folder(uri, None), port)
    return _serve(command, environment, str(path), _HERE, port, lambda: _ui_greeting(uri, port, runs))


def server(store: str | None, host: str, port: int, extra: Sequence[str] = (), artifacts: Path | None = None) -> int:
    """Serves a store to whoever may reach `host` until interrupted; returns the server's exit code.

    Args:
        store: The store; None takes that of MLFLOW_BACKEND_STORE_URI, else `SHARED_STORE`.
        host: The name or address of this machine to listen on; 0.0.0.0 for all.
        port: The port.
        extra: Further names by which nodes call this machine.
        artifacts: The folder for files; None takes `mlartifacts`, beside an SQLite store or else where we stand.

    Raises:
        StoreError: the store, the folder or the port cannot be used.
        BadInput: the host is not this machine.
    """
    uri = server_store.named(store, SHARED_STORE, os.environ)
    served = server_names.names(host, extra)
    address = server_names.bind_address(host)[1]
    _check_port(host, port, "server")
    server_store.check(uri)
    folder = server_store.artifacts_folder(uri, artifacts)
    command, environment = server_command(uri, folder, port, address, served, [name.lower() for name in extra])
    shown = without_password(uri) if database(uri) is None else uri.removeprefix(SQLITE)
    where = f"{shown}, files in {folder}"
    return _serve(command, environment, where, address, port, lambda: _server_greeting(host, address, port, served))


def _check_port(host: str, port: int, target: str) -> None:
    """Raises StoreError for a port that cannot be listened on, BadInput for an address that is not here."""
    family, address = server_names.bind_address(host)
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if port == 0:
                raise OverflowError("it stands for any free one")
            probe.bind((address, port))
        except (OSError, OverflowError) as error:
            if getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
                raise server_names.not_here(host) from None
            reason = getattr(error, "strerror", None) or error
            mend = f"choose another with --port (make {target} PORT=)"
            if getattr(error, "errno", None) == errno.EADDRINUSE and wait_for_health(port, 0.5, address=address):
                beside = typed(target, "--port", str(port + 1))
                mend = f"an MLflow server has it, of make ui or make server; {beside} starts this one beside it"
            raise StoreError(f"port {port}: cannot be used ({reason}); {mend}") from None


def _server_greeting(host: str, address: str, port: int, served: Sequence[str]) -> list[str]:
    """Returns what is said once a shared server answers: its address for configurations, who can reach it."""
    name = server_names.best(host, served)
    others = [f"http://{other}:{port}" for other in served if other != name and not server_names.has_port(other)]
    if server_names.is_loopback(address):
        why = "" if host in (address, "localhost") else f"{host} leads no further here; "
        who = f"for this machine only ({why}--host 0.0.0.0: for every machine that reaches it)"
    else:
        who = "for every machine that reaches it; it asks for no password, does not encrypt"
    return [
        f"tracking.uri=http://{name}:{port}",
        *([f"also called {', '.join(others)}"] if others else []),
        f"listens on {address} port {port}, {who}",
        f"in a browser: http://{name}:{port}/#/experiments{_UI_END}",
        "Ctrl-C here stops the server.",
    ]


def _ui_greeting(uri: str, port: int, runs: Path | None) -> list[str]:
    """Returns what is said once the server answers: links to claims and the newest runs, its address, how to stop it.

    Claims that have no verdict yet come after the others, each on one line.
    """
    host = f"{_HERE}:{port}"
    lines: list[str] = []
    if runs is not None:
        begun = []
        for entry in sink_state.load(runs / sink_state.CLAIMS_FILE, resolve(uri)).values():
            if entry.get("verdict") == PENDING:
                page = run_path(str(entry["experiment"]), str(entry["run"]))
                begun.append(f"not finished: {entry['id']}, profile {entry['profile']}  http://{host}/{page}")
            else:
                lines += links(runs, uri, entry["id"], entry["profile"], host)
        lines += [*begun, *_newest_runs(uri, runs, host)]
    return [
        *lines,
        f"MLflow UI: http://{host}/#/experiments{_UI_END}",
        "Open this address in a browser on this machine. Ctrl-C here stops the server.",
    ]


def _newest_runs(uri: str, runs: Path, host: str) -> list[str]:
    """Returns the links to the newest runs of no claim."""
    lines, count = [], 0
    for name in newest_first(names_in(runs), runs):
        if found := run_links(runs / name, uri, host):
            lines += [name, *found]
            count += 1
        if count == _NEWEST_RUNS:
            break
    return lines


def _serve(
    command: list[str],
    environment: dict[str, str],
    what: str,
    address: str,
    port: int,
    greeting: Callable[[], list[str]],
) -> int:
    """Runs a server until it ends (code 1) or this process is interrupted (code 0)."""
    print(f"starting the MLflow server for {what} (some ten seconds) ...", flush=True)
    # SIGINT too: whoever starts this in the background of a script has it ignored, and nothing else would stop it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stoppable(), tempfile.TemporaryFile() as log:  # what a server says of itself helps where it fails alone
            return _watch(command, environment, log, address, port, greeting)
    except KeyboardInterrupt:
        print("the MLflow server has stopped", flush=True)
        return 0
    finally:
        signal.signal(signal.SIGINT, before)


def _watch(
    command: list[str],
    environment: dict[str, str],
    log: IO[bytes],
    address: str,
    port: int,
    greeting: Callable[[], list[str]],
) -> int:
    # In a session of its own, Ctrl-C reaches this process alone, which ends the server without its traceback.
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        if wait_for_health(port, _START_S, lambda: process.poll() is None, address):
            print("\n".join(greeting()), flush=True)
        elif process.poll() is None:
            print(f"no answer from the server after {_START_S:.0f} s; Ctrl-C stops it", file=sys.stderr, flush=True)
        code = process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
        if _OTHER_VERSION in said:
            mend = "copy the database, then run mlflow db upgrade on it (or name another)"
            raise StoreError(f"tracking.uri: the store was made by another version of MLflow; {mend}")
        last = said.splitlines()[-_LINES:]
        print("\n".join([f"normscale: the MLflow server ended with exit code {code}", *last]), file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C does not leave half of it
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a server and whatever it has started; what does not end by itself is killed."""
    with suppress(OSError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with suppress(OSError):  # the group is gone: nobody was left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for_health(
    port: int, timeout: float = 60.0, alive: Callable[[], bool] = lambda: True, address: str = _HERE
) -> bool:
    """Returns whether a server of this machine answers within `timeout` seconds; `alive` may say that it died."""
    host = {"0.0.0.0": _HERE, "::": "[::1]"}.get(address, f"[{address}]" if ":" in address else address)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy knows this machine as we do
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and alive():
        try:
            with direct.open(f"http://{host}:{port}/health", timeout=2) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    return False
