import fnmatch
import socket

import pytest

from normscale.errors import BadInput
from normscale.tracking import server_names
from normscale.tracking.server_names import allowed_hosts, allowed_origins, best, bind_address, is_own, names


@pytest.fixture(autouse=True)
def node7(monkeypatch):
    """A machine called node7.lab with two addresses, where only that name and node7 lead to one of them."""
    known = {"node7": "10.0.0.7", "node7.lab": "10.0.0.7", "localhost": "127.0.0.1"}

    def look_up(host, port, type=0):
        address = known.get(host, host)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        if family == socket.AF_INET and not address.replace(".", "").isdigit():
            raise socket.gaierror(-2, "Name or service not known")
        return [(family, type, 6, "", (address, port or 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "Node7")
    monkeypatch.setattr(socket, "getfqdn", lambda: "node7.lab")
    monkeypatch.setattr(server_names, "addresses", lambda: ["10.0.0.7", "[fd00::7]"])
    return known


def lets_in(allowed, host):
    """As mlflow 3.17 compares (mlflow/server/security_utils.py)."""
    return any(fnmatch.fnmatch(host, one) if "*" in one else host == one for one in allowed)


def test_a_server_for_this_machine_has_no_name_but_those_of_loopback():
    served = names("127.0.0.1")
    assert (served, best("127.0.0.1", served), allowed_origins(served, [], 5000)) == ([], "127.0.0.1", [])
    allowed = allowed_hosts(served, 5000)
    for host in ("127.0.0.1:5000", "localhost:5000", "[::1]:5000", "localhost:8080", "localhost"):
        assert lets_in(allowed, host), host
    for host in ("node7:5000", "10.0.0.7:5000", "10.evil.example", "localhost.evil.example", "evil.example:5000"):
        assert not lets_in(allowed, host), host


def test_a_server_for_all_is_called_by_every_name_and_address_of_the_machine_and_by_no_other():
    served = names("0.0.0.0", ["Tracking.lab", "proxy.lab:8443"])
    assert served == ["node7", "node7.lab", "10.0.0.7", "[fd00::7]", "tracking.lab", "proxy.lab:8443"]
    assert best("0.0.0.0", served) == "node7"
    allowed = allowed_hosts(served, 5000)
    for host in ("node7:5000", "node7.lab:5000", "10.0.0.7:5000", "[fd00::7]:5000", "tracking.lab", "proxy.lab:8443"):
        assert lets_in(allowed, host), host
    for host in (
        "10.0.0.8:5000",
        "node8:5000",
        "node7.evil.example:5000",
        "192.168.1.1:5000",
        "node7:5001",
        "proxy.lab",
    ):
        assert not lets_in(allowed, host), host


def test_pages_of_the_server_itself_may_send_requests_whatever_it_is_called():
    served = names("10.0.0.7", ["proxy.lab"])
    assert allowed_origins(served, ["proxy.lab"], 80) == [
        "http://10.0.0.7:80",
        "http://node7:80",
        "http://node7.lab:80",
        "http://proxy.lab:80",
        "http://proxy.lab",
        "https://proxy.lab",
    ]


def test_where_the_name_leads_elsewhere_the_address_is_named(node7):
    node7["node7"] = node7["node7.lab"] = "127.0.1.1"  # Debian's /etc/hosts
    assert best("0.0.0.0", names("0.0.0.0")) == "10.0.0.7"
    assert names("node7") == ["node7", "127.0.1.1"]  # it is loopback, then, and so is the server


def test_what_is_no_name_or_not_here_is_one_line():
    for host in ("nosuch", "10.0.0.300/8", ""):
        with pytest.raises(BadInput, match=r"--host: .*it has 127\.0\.0\.1, 10\.0\.0\.7, \[fd00::7\]"):
            bind_address(host)
    for name in ("*", "10.*", "http://node7", "node 7", "node7,evil", "node7/", "", "node7:", "-x"):
        with pytest.raises(BadInput, match=r"--name: .*is not the name of a machine"):
            names("127.0.0.1", [name])


def test_what_is_this_machine():
    assert all(map(is_own, ("localhost", "127.0.0.1", "::1", "[::1]", "node7", "NODE7", "10.0.0.7", "fd00::7")))
    assert not any(map(is_own, ("node8", "10.0.0.8", "")))
