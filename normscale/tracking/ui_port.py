"""At which port of this machine a store is, or would be, looked at: links that are printed must lead to it.

`make ui` and `make server` begin with the same port and serve different stores, so that a link to a port that the other
has would lead to a store without the run.
"""

import socket
import urllib.error
import urllib.parse
import urllib.request

HERE = "127.0.0.1"
UI_PORT = 5000
TRIED = 5
ANSWER_S = 1.0


def ui_port(run: str | None) -> int:
    """Returns the first port from UI_PORT on that is free, or whose MLflow server knows this run."""
    ports = range(UI_PORT, UI_PORT + TRIED)
    return next((port for port in ports if is_free(port) or (run and _knows(port, run))), UI_PORT)


def is_free(port: int) -> bool:
    """Returns whether nobody listens at a port of this machine's loopback."""
    try:
        socket.create_connection((HERE, port), ANSWER_S).close()
    except OSError:
        return True
    return False


def _knows(port: int, run: str) -> bool:
    """Returns whether an MLflow server that listens there has this run."""
    asked = f"http://{HERE}:{port}/api/2.0/mlflow/runs/get?{urllib.parse.urlencode({'run_id': run})}"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(asked, timeout=ANSWER_S) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):  # it has not, or is something else
        return False
