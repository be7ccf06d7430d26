"""Why hosts cannot be made, said in one line; these run everywhere."""

import os
from collections.abc import Iterator

import pytest

from tests.cluster import needs


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    needs.why_not.cache_clear()
    yield
    needs.why_not.cache_clear()


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert needs.why_not() == "hosts are made of namespaces, which only root can make"
    monkeypatch.setenv("CI", "true")
    assert not needs.must_run()


def test_what_is_missing_is_named_by_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(needs, "tool", lambda name: None if name in ("slurmd", "sbatch", "pdsh") else f"/bin/{name}")
    assert needs.why_not() == "missing here: apt-get install --no-install-recommends pdsh slurm-wlm"
    monkeypatch.delenv("CI", raising=False)
    assert not needs.must_run()
    monkeypatch.setenv("CI", "true")
    assert needs.must_run()


def test_root_without_the_right_to_make_namespaces_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(needs, "tool", lambda name: f"/bin/{name}")
    monkeypatch.setattr(needs.sys, "executable", "/bin/false")
    reason = needs.why_not()
    assert reason is not None
    assert "CAP_SYS_ADMIN" in reason
