"""Links lead to a server that has the run, or to a port where one can be started."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from normscale.errors import StoreError
from normscale.tracking import server, ui_port
from normscale.tracking.sink_process import ui_words


class Knowing(BaseHTTPRequestHandler):
    """Answers as an MLflow server that has one run."""

    def do_GET(self) -> None:
        known = self.path in ("/api/2.0/mlflow/runs/get?run_id=known", "/health")
        self.send_response(200 if known else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of such a server, which is the first one that is tried."""
    with HTTPServer(("127.0.0.1", 0), Knowing) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        monkeypatch.setattr(ui_port, "UI_PORT", served.server_port)
        yield served.server_port
        served.shutdown()


def test_a_server_that_has_the_run_is_linked_to_and_another_is_passed_over(port: int) -> None:
    assert ui_port.ui_port("known") == port
    for run in ("other", None):
        beside = ui_port.ui_port(run)
        assert port < beside < port + ui_port.TRIED
        assert ui_port.is_free(beside)


def test_a_free_port_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers
        monkeypatch.setattr(ui_port, "UI_PORT", probe.getsockname()[1])
        assert ui_port.ui_port("known") == probe.getsockname()[1]


def test_the_command_names_a_port_that_is_not_the_first() -> None:
    assert ui_words("sqlite:///a.db", "sqlite:///a.db").endswith(" ui")
    assert "--port 5001" in ui_words("sqlite:///a.db", "sqlite:///a.db", 5001)
    assert "--port" not in ui_words("http://h:5000", None, 5001)


def test_a_port_that_another_mlflow_server_has_is_said_to_be(port: int) -> None:
    with pytest.raises(StoreError, match=rf"port {port}: .*an MLflow server has it, .*--port {port + 1}"):
        server._check_port("127.0.0.1", port, "ui")
