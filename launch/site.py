"""What an agent finds out about its host, for a launcher that has to know before any rank starts."""

import errno
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REACH_S = 5.0


def machine(environ: Mapping[str, str]) -> str | None:
    """Returns what tells this host from others, by whatever names it is reached; None where it is not by ssh."""
    if "SSH_CONNECTION" not in environ:
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "?"
    return f"{socket.gethostname()} {boot}"


def answer(asked: dict[str, Any], held: list[socket.socket] | None = None) -> dict[str, Any]:
    """Returns what the launcher has to know of this host: a free port where it asks for one, and what is wrong here.

    The socket that has the port goes on to listen in `held`, so that the hosts can try to reach it.
    """
    said: dict[str, Any] = {"wrong": []}
    if "port" in asked:
        try:
            listener = listen(asked["port"])
            said["port"] = listener.getsockname()[1]
            listener.close() if held is None else held.append(listener)
        except OSError as error:
            reason = os.strerror(error.errno or errno.EINVAL).lower()
            said["wrong"].append(f"port {asked['port']}: {reason}; choose another, or leave --port out for a free one")
    own = socket.gethostname()
    wrong = cannot_find(asked.get("master"), own == asked.get("first"))
    if wrong is None and asked.get("several"):
        wrong = cannot_be_found(own)
    said["wrong"] += [wrong] if wrong else []
    return said


def listen(port: int) -> socket.socket:
    """Returns a socket that listens at the port, or at a free one for 0, as the store of the ranks will.

    Raises:
        OSError: it is taken.
    """
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port))


def cannot_reach(master: str, port: int) -> str | None:
    """Returns why ranks of this host could not reach those of the first, which listens at the port, if they could not.

    Torch would try for a quarter of an hour.
    """
    try:
        socket.create_connection((master, port), REACH_S).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return (
            f"cannot reach {master}:{port}, where the ranks meet ({reason.lower()}); open the ports between the hosts, "
            "or give --master-addr with an address of the first host"
        )
    return None


def cannot_find(master: str | None, is_master: bool) -> str | None:
    """Returns why ranks of this host could not meet at `master`, if they could not."""
    if master is None:
        return None
    mend = "mend /etc/hosts here, or give --master-addr ADDRESS"
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return f"does not know {master}, where the ranks meet; {mend}"
    if all(map(_is_loopback, found)) and not is_master:
        return f"takes {master}, where the ranks meet, for itself ({min(found)}); {mend}"
    return None


def cannot_be_found(name: str) -> str | None:
    """Returns why ranks of other hosts could not reach those of this one, if they could not.

    gloo gives the others the address that this host's own name stands for here, which Debian has be 127.0.1.1.
    """
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return None  # gloo takes the first interface then
    if not all(map(_is_loopback, found)):
        return None
    return (
        f"takes its own name {name} for {min(found)}, which the ranks of other hosts would be told; give the name its "
        "address in /etc/hosts there, or set GLOO_SOCKET_IFNAME to the network interface"
    )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
