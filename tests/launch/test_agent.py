"""What an agent finds out about its host."""

import socket

import pytest

from launch.site import answer, cannot_be_found, cannot_find, cannot_reach, machine


def resolve(monkeypatch: pytest.MonkeyPatch, **names: list[str]) -> None:
    def found(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name not in names:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in names[name]]

    monkeypatch.setattr("socket.getaddrinfo", found)


def test_a_port_that_is_free_or_was_asked_for():
    held: list[socket.socket] = []
    port = answer({"port": 0}, held)["port"]
    assert cannot_reach("localhost", port) is None  # it listens until the ranks start
    held.pop().close()
    reason = str(cannot_reach("localhost", port))
    assert reason.startswith(
        f"cannot reach localhost:{port}, where the ranks meet (connection refused); open the ports"
    )
    assert answer({"port": port}) == {"port": port, "wrong": []}
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        number = taken.getsockname()[1]
        (wrong,) = answer({"port": number})["wrong"]
    assert wrong == f"port {number}: address already in use; choose another, or leave --port out for a free one"


def test_a_host_must_know_where_the_ranks_meet(monkeypatch: pytest.MonkeyPatch):
    resolve(monkeypatch, n0=["10.0.0.1"], both=["127.0.1.1", "10.0.0.1"], me=["127.0.1.1", "::1"])
    assert cannot_find(None, False) is None
    assert cannot_find("n0", False) is None
    assert cannot_find("both", False) is None
    assert cannot_find("me", True) is None
    assert "takes me, where the ranks meet, for itself (127.0.1.1)" in str(cannot_find("me", False))
    assert "does not know n9" in str(cannot_find("n9", False))


def test_a_host_must_be_found_by_its_own_name(monkeypatch: pytest.MonkeyPatch):
    resolve(monkeypatch, n0=["10.0.0.1"], me=["127.0.1.1"])
    assert cannot_be_found("n0") is None
    assert cannot_be_found("unknown") is None
    said = str(cannot_be_found("me"))
    assert "takes its own name me for 127.0.1.1" in said
    assert "GLOO_SOCKET_IFNAME" in said
    monkeypatch.setattr("socket.gethostname", lambda: "me")
    assert answer({"several": True})["wrong"] == [said]
    assert answer({"several": False})["wrong"] == []


def test_a_host_is_itself_by_whatever_name():
    assert machine({}) is None
    name = machine({"SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"})
    assert name is not None
    assert name.startswith(f"{socket.gethostname()} ")
    assert name == machine({"SSH_CONNECTION": "::1 1 ::1 22"})
