"""The files that let the hosts of a cluster find and trust each other."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.needs import tool

SSHD_CONFIG = """\
Port 22
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/user_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
UseDNS no
PidFile none
MaxStartups 100
PrintMotd no
"""
SSH_CONFIG = """\
Host *
  IdentityFile /etc/ssh/user_key
  IdentitiesOnly yes
  UserKnownHostsFile /dev/null
  GlobalKnownHostsFile /etc/ssh/known_hosts
  StrictHostKeyChecking yes
  ConnectTimeout 10
"""


def write(folder: Path, addresses: Mapping[str, str]) -> None:
    """Writes what `over` puts over the machine's own files on every host."""
    ssh, etc = folder / "ssh", folder / "etc"
    for path in (ssh, etc, folder / "slurm" / "etc"):
        path.mkdir(parents=True)
    for name in ("host_key", "user_key"):
        words = [tool("ssh-keygen") or "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(ssh / name)]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    names = ",".join([*addresses, *addresses.values()])
    (ssh / "known_hosts").write_text(f"{names} {(ssh / 'host_key.pub').read_text()}")
    (ssh / "sshd_config").write_text(SSHD_CONFIG)
    (ssh / "ssh_config").write_text(SSH_CONFIG)
    # torch's store knows its clients by the second form, and would ask a name server for them.
    pairs = [("127.0.0.1", "localhost"), *((address, name) for name, address in addresses.items())]
    lines = ["::1 localhost ip6-localhost"]
    lines += [f"{before}{address} {name}" for before in ("", "::ffff:") for address, name in pairs]
    (etc / "hosts").write_text("\n".join(lines) + "\n")
    (etc / "resolv.conf").write_text("")
    for name in addresses:
        (etc / f"hostname.{name}").write_text(f"{name}\n")


def over(folder: Path, name: str) -> dict[str, str]:
    """Returns the files and folders of the cluster by what they are put over on one host."""
    return {
        str(folder / "ssh"): "/etc/ssh",
        str(folder / "slurm" / "etc"): "/etc/slurm",
        str(folder / "etc" / "hosts"): "/etc/hosts",
        str(folder / "etc" / "resolv.conf"): "/etc/resolv.conf",
        str(folder / "etc" / f"hostname.{name}"): "/etc/hostname",
    }


def hidden(paths: list[str], own: tuple[str, ...]) -> list[str]:
    """Returns those paths that lie in folders of which a host has its own, and so must be put there again."""
    found = {os.path.realpath(path) for path in paths}
    return sorted(path for path in found if any(path.startswith(f"{folder}/") for folder in own))
