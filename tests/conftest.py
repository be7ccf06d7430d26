"""What every test runs under: one thread, no hub, no telemetry, no network but this machine, signals as usual."""

import atexit
import ipaddress
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

# Before anything imports torch, datasets or mlflow; child processes inherit them.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    DO_NOT_TRACK="1",
    MPLBACKEND="Agg",
    TOKENIZERS_PARALLELISM="false",
)
for _name in [name for name in os.environ if name.startswith(("ACCELERATE_", "NORMSCALE_", "MLFLOW_RUN", "MAKE"))]:
    if _name != "NORMSCALE_WRITE_GOLDEN":
        del os.environ[_name]

# Caches of data sets, and a user's own defaults of Accelerate, stay out of the tests.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="normscale-tests-hf-")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)

# Under nohup, and in the background of a script, these are ignored, by child processes too; tests send them.
for _number, _usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

import pytest  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests that need a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a GPU (make test-gpu)"))


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """Makes a connection to anything but this machine a failure of the test that tried it."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def guard(address: Any) -> None:
        if isinstance(address, tuple) and not _is_loopback(str(address[0])):
            pytest.fail(f"a test tried to reach {address[0]}:{address[1]}; tests talk to this machine only")

    def guarded_connect(self: socket.socket, address: Any) -> None:
        guard(address)
        return connect(self, address)

    def guarded_connect_ex(self: socket.socket, address: Any) -> int:
        guard(address)
        return connect_ex(self, address)

    patch = pytest.MonkeyPatch()
    patch.setattr(socket.socket, "connect", guarded_connect)
    patch.setattr(socket.socket, "connect_ex", guarded_connect_ex)
    yield
    patch.undo()


def _is_loopback(host: str) -> bool:
    if host in ("localhost", "", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
