"""Real tracking servers for tests, and a gate before one that asks for a password. All on loopback."""

import base64
import http.client
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from normscale.tracking.server import server_command, wait_for_health

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A tracking server on one database, that can be killed and started again on its port."""

    def __init__(self, store: str, folder: Path) -> None:
        self.store, self.folder, self.port = store, folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        path = Path(self.store.removeprefix("sqlite:///"))
        files = path.with_name("mlartifacts") if self.store.startswith("sqlite:///") else self.folder / "mlartifacts"
        command, environment = server_command(self.store, files, self.port)
        log = self.folder / "server.log"
        with log.open("ab") as out:
            self.process = process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        assert wait_for_health(self.port, 90, lambda: process.poll() is None), log.read_text()

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextmanager
def shared_server(folder: Path, *options: str, **variables: str) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """Gives `normscale server`, started in a folder, and what it has said once it answers; ends it by Ctrl-C."""
    command = [sys.executable, "-m", "normscale", "server", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    with (folder / "server.err").open("w") as err:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=err, text=True, start_new_session=True
        )
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line.rstrip("\n"))
        if said[-1].startswith("Ctrl-C"):
            break
    assert said[-1:] == ["Ctrl-C here stops the server."], (said, (folder / "server.err").read_text())
    try:
        yield process, said
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.stdout.close()


def ask(port: int, path: str, host: str, method: str = "GET", body: str | None = None, **headers: str) -> int:
    """Returns the status of a request that calls the server at a port by the name `host`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": host, "Content-Type": "application/json", **headers}.items():
        connection.putheader(name, value)
    data = (body or "").encode()
    connection.putheader("Content-Length", str(len(data)))
    connection.endheaders(data)
    status = connection.getresponse().status
    connection.close()
    return status


class Gate(http.server.BaseHTTPRequestHandler):
    """Hands requests with the right password on to a server, as a proxy before it would."""

    protocol_version = "HTTP/1.1"
    port, wanted, denied, passed = 0, "", 0, 0

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != type(self).wanted:
            type(self).denied += self.path != "/health"
            self._send(401, {}, b"who are you?")
            return
        type(self).passed += 1
        behind = http.client.HTTPConnection("127.0.0.1", type(self).port, timeout=60)
        kept = {k: v for k, v in self.headers.items() if k.lower() not in ("authorization", "host", "connection")}
        behind.request(self.command, self.path, body, kept)
        answer = behind.getresponse()
        self._send(answer.status, {"Content-Type": answer.headers.get("Content-Type", "")}, answer.read())
        behind.close()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def gate(port: int, user: str, password: str) -> Iterator[tuple[str, type[Gate]]]:
    """Gives the address of a gate before the server at a port, and what it counts."""
    wanted = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    handler = type("OneGate", (Gate,), {"port": port, "wanted": wanted})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        proxy.daemon_threads = True
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}", handler
        proxy.shutdown()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started, and those that they have, and so on."""
    try:
        own = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return own + [each for one in own for each in children(one)]
