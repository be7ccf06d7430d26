"""Hosts that are this machine: an `ssh` on the PATH that runs the command here, as `sh -c` on a host would."""

import os
from pathlib import Path

import pytest

FAKE_SSH = """#!/bin/sh
printf '%s\\n' "$*" >> {folder}/ssh.log
while [ $# -gt 2 ]; do shift; done
case "$1" in
refused) echo "ssh: connect to host refused port 22: Connection refused" >&2; exit 255 ;;
nowhere) echo "ssh: Could not resolve hostname nowhere: Name or service not known" >&2; exit 255 ;;
nokey) echo "root@nokey: Permission denied (publickey,password)." >&2; exit 255 ;;
silent) exec sleep 60 ;;
esac
echo "Welcome to $1"
echo "a warning of $1" >&2
sh -c "$2"
"""


@pytest.fixture
def hosts_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives the folder where the fake ssh writes down what it was asked (ssh.log)."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(FAKE_SSH.format(folder=tmp_path))
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path
