"""What tests with several ranks share."""

import socket
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> str:
    """Returns a port of this machine that was free a moment ago."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return str(held.getsockname()[1])
