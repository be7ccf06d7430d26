"""By which names a tracking server may be called: mlflow turns every request away that calls it by another.

That is its guard against pages of foreign sites which have their own name point at this machine. mlflow's list for a
server that is given none lets in whatever begins with `10.`, so that a list is always given here, with nothing more on
it than the names of the machine, of loopback (also as the near end of a tunnel, on any port) and those asked for.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence

from normscale.errors import BadInput

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_ANY_PORT = ("localhost:*", "127.0.0.1:*", "[[]::1]:*")  # mlflow matches those with a star as file names
_ALL = ("0.0.0.0", "::")
_NAME = re.compile(r"([a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


def is_loopback(host: str) -> bool:
    """Returns whether a server that listens on `host` is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_own(host: str) -> bool:
    """Returns whether a name or address is this machine's, as far as it is known without asking anybody."""
    return is_loopback(host) or host.lower() in {name.strip("[]") for name in (*_host_name(), *addresses())}


def bind_address(host: str) -> tuple[socket.AddressFamily, str]:
    """Returns what to listen on for a name or an address of this machine.

    Raises:
        BadInput: nobody knows the name.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"--host: {host!r} is no name or address of this machine ({reason}); {_own_words()}") from None
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(address[0])


def not_here(host: str) -> BadInput:
    """Returns the error about an address that is another machine's."""
    return BadInput(f"--host: {host} is not an address of this machine; {_own_words()}")


def names(host: str, extra: Iterable[str] = ()) -> list[str]:
    """Returns the names, without a port, by which other machines may call a server that listens on `host`.

    Raises:
        BadInput: nobody knows the host, or one of the extra names could not be a name.
    """
    asked = [_checked(name) for name in extra]
    address = bind_address(host)[1]
    given = [] if host in _ALL else [_bracketed(host.lower())]
    if is_loopback(address):
        own = [_bracketed(address)]
    else:
        own = [*_host_name(), *_full_name(), *(addresses() if address in _ALL else [_bracketed(address)])]
    return [name for name in dict.fromkeys([*given, *own, *asked]) if name not in LOOPBACK]


def allowed_hosts(served: Sequence[str], port: int) -> list[str]:
    """Returns what a request may have in its Host field."""
    return [*LOOPBACK, *_ANY_PORT, *(each for name in served for each in dict.fromkeys((name, _with(name, port))))]


def allowed_origins(served: Sequence[str], extra: Iterable[str], port: int) -> list[str]:
    """Returns the pages that may send requests: those of the server itself, by any of its names.

    An extra name may be that of a proxy before the server, which has its own port and scheme.
    """
    proxies = [f"{scheme}://{name.lower()}" for name in extra for scheme in ("http", "https")]
    return list(dict.fromkeys([*(f"http://{_with(name, port)}" for name in served), *proxies]))


def has_port(name: str) -> bool:
    """Returns whether a name as `names` returns them holds a port."""
    return ":" in name.rpartition("]")[2]


def best(host: str, served: Sequence[str]) -> str:
    """Returns the name that other machines most likely know: one that leads to an address of this machine itself."""
    if is_loopback(bind_address(host)[1]):
        return _bracketed(host)
    if host not in _ALL:
        return served[0]
    own = [name for name in served if name in addresses()]
    for name in served:
        if name not in own and _leads_to(name, own):
            return name
    return own[0] if own else LOOPBACK[1]


def addresses() -> list[str]:
    """Returns the addresses of this machine that others may use, those of IPv6 in brackets."""
    import psutil

    found = []
    for each in (one for interface in psutil.net_if_addrs().values() for one in interface):
        if each.family not in (socket.AF_INET, socket.AF_INET6) or "%" in each.address:
            continue
        address = ipaddress.ip_address(each.address)
        if not (address.is_loopback or address.is_link_local):
            found.append(_bracketed(str(address)))
    return sorted(dict.fromkeys(found), key=lambda name: name.startswith("["))


def _host_name() -> list[str]:
    name = socket.gethostname().lower()
    return list(dict.fromkeys([name.partition(".")[0], name]))


def _full_name() -> list[str]:
    """Returns the name with its domain, for which other machines may be asked."""
    name = socket.getfqdn().lower()
    return [] if name.startswith("localhost") else [name]


def _leads_to(name: str, own: Sequence[str]) -> bool:
    try:
        found = {_bracketed(str(entry[4][0])) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    return bool(found & set(own))


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name.lower()):
        raise BadInput(f"--name: {name!r} is not the name of a machine; give one each time, without http://, as: node0")
    return name.lower()


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def _with(name: str, port: int) -> str:
    return name if has_port(name) else f"{name}:{port}"


def _own_words() -> str:
    return f"it has {', '.join([*LOOPBACK[1:2], *addresses()])} (all of them: 0.0.0.0)"
