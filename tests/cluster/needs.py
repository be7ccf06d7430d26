"""What hosts and Slurm need of the machine, and the reason where it is not there."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

TOOLS = {
    "ip": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "pdsh": "pdsh",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
}
SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # not on every root's PATH


def tool(name: str) -> str | None:
    """Returns where a program is."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *SYSTEM_FOLDERS]))


@cache
def why_not() -> str | None:
    """Returns why no host can be made here, in one line; None where they can."""
    if sys.platform != "linux":
        return "hosts are made of Linux namespaces"
    if os.geteuid() != 0:
        return "hosts are made of namespaces, which only root can make"
    missing = {package for name, package in TOOLS.items() if tool(name) is None}
    if missing:
        return f"missing here: apt-get install --no-install-recommends {' '.join(sorted(missing))}"
    tried = subprocess.run(
        [sys.executable, "-E", "-S", str(Path(__file__).with_name("namespaces.py"))], capture_output=True, text=True
    )
    if tried.returncode:
        return f"root may not make namespaces here ({tried.stderr.strip() or tried.returncode}); it lacks CAP_SYS_ADMIN"
    return None


def must_run() -> bool:
    """Returns whether a reason not to run is a failure: under CI, as root."""
    return os.environ.get("CI") == "true" and sys.platform == "linux" and os.geteuid() == 0
