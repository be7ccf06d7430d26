"""A cluster of hosts on this machine, bound to the life of this process.

    with Cluster(2) as cluster:
        print(cluster["node0"].run("ssh", "node1", "hostname").out)
        cluster["node1"].power_off()

A host is a set of namespaces with an address, a name, an sshd, and /tmp, /run and /dev/shm of its own; all else of the
machine's files it shares with the others, as by NFS. Its cable leads to a bridge in the rack, which no packet leaves.
Nothing of it is in the machine's own network, and `~/.ssh` is neither read nor written. When the process that made a
cluster ends, however it does, the hosts and all that runs on them end with it.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from tests.cluster import keys
from tests.cluster.common import HERE, PYTHON, bare_environment, wait_until
from tests.cluster.handle import Host
from tests.cluster.needs import tool, why_not
from tests.cluster.processes import Process, running_in


class Cluster:
    """Hosts node0, node1, ... on one cable each.

    Attributes:
        folder: of the cluster, the same on all hosts; `shared` in it is for whoever uses the cluster.
        disk: a small disk that all hosts share, and whose size or mode can be changed while it is in use. It is
            mounted on the hosts alone; `seen` says where this process finds what is on it.
    """

    def __init__(self, size: int = 2, folder: Path | None = None) -> None:
        if reason := why_not():
            raise RuntimeError(reason)
        self._made = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="normscale-cluster-"))
        self.shared, self.disk, self.log = (self.folder / name for name in ("shared", "disk", "log"))
        for path in (self.shared, self.disk, self.log):
            path.mkdir(parents=True)
        self.hosts = [Host(self, f"node{k}", f"10.77.0.{10 + k}") for k in range(size)]
        keys.write(self.folder, {host.name: host.address for host in self.hosts})
        self.rack: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Cluster":
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def up(self) -> None:
        """Starts the rack and all hosts."""
        self.rack = subprocess.Popen(
            [
                *PYTHON,
                str(HERE / "rack.py"),
                str(os.getpid()),
                str(self.disk),
                *([str(self.folder)] if self._made else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=bare_environment(),
        )
        assert self.rack.stdout is not None
        if self.rack.stdout.readline() != b"ready\n":
            raise RuntimeError("the rack did not come up")
        self.ip("link add bridge type bridge", "link set bridge up")
        for host in self.hosts:
            host.switch_on()
        for host in self.hosts:
            host.wait_until_up()

    def down(self) -> None:
        """Ends all hosts and removes what there was of them."""
        for host in self.hosts:
            host.kill()
        if self.rack is not None:
            self.rack.communicate()  # its input ends, and so does it
            self.rack = None
        if self._made:
            shutil.rmtree(self.folder, ignore_errors=True)

    def ip(self, *commands: str) -> None:
        """Runs commands of `ip` in the rack."""
        assert self.rack is not None
        program = ["nsenter", "-t", str(self.rack.pid), "-n", tool("ip") or "ip", "-batch", "-"]
        done = subprocess.run(program, input="\n".join(commands), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ip: {done.stderr.strip()}")

    def seen(self, path: Path) -> Path:
        """Returns where this process finds a file of the shared disk."""
        assert self.rack is not None
        return Path(f"/proc/{self.rack.pid}/root") / path.relative_to("/")

    def remount(self, options: str) -> None:
        """Changes the shared disk: `ro`, `rw`, or `size=BYTES` (what is there stays)."""
        assert self.rack is not None
        words = ["nsenter", "-t", str(self.rack.pid), "-m", "mount", "-o", f"remount,{options}", str(self.disk)]
        subprocess.run(words, check=True)

    def processes(self) -> dict[str, list[Process]]:
        """Returns all that runs on each host that is up."""
        up = {host.namespace: host.name for host in self.hosts if host.namespace}
        return {up[namespace]: found for namespace, found in running_in(set(up)).items()}

    def left(self) -> dict[str, list[str]]:
        """Returns what runs on the hosts besides what ran there when they had come up."""
        found = {name: self[name].besides(processes) for name, processes in self.processes().items()}
        return {name: [process.line for process in processes] for name, processes in found.items() if processes}

    def wait_until_idle(self, limit_s: float) -> dict[str, list[str]]:
        """Waits until nothing is left on any host; returns what still is after `limit_s`."""
        wait_until(lambda: not self.left(), limit_s)
        return self.left()
