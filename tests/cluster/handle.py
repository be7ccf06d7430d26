"""One host of a cluster, held from outside: its power, its cable, and what runs on it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tests.cluster import keys
from tests.cluster.common import HERE, PATIENCE, PYTHON, ROOT, bare_environment
from tests.cluster.needs import tool
from tests.cluster.processes import Process, namespace_of, running_in

if TYPE_CHECKING:
    from tests.cluster.hosts import Cluster

OWN_FOLDERS = ("/tmp", "/run", "/dev/shm")  # of which a host has its own


@dataclass(frozen=True)
class Done:
    """A command that has ended: its exit code (below 0: the signal that ended it) and what it said."""

    code: int
    out: str
    err: str


class Started:
    """A command that runs on a host, and says what it says into files."""

    def __init__(self, host: "Host", argv: tuple[str, ...], env: Mapping[str, str], folder: Path) -> None:
        entered = [*PYTHON, str(HERE / "enter.py"), str(os.getpid()), str(host.pid), str(folder), *argv]
        self._out, self._err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 (they live as long as this)
        self.process = subprocess.Popen(
            entered, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, env=dict(env)
        )

    @property
    def out(self) -> str:
        """What it has said on standard output."""
        return _text(self._out)

    @property
    def err(self) -> str:
        """What it has said on standard error."""
        return _text(self._err)

    def running(self) -> bool:
        """Returns whether it still runs."""
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        self.process.send_signal(number)

    def wait(self, limit_s: float) -> Done:
        """Waits for its end; kills it, and raises, if that does not come in time."""
        try:
            code = self.process.wait(limit_s * PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"did not end within {limit_s:g} s; it said:\n{self.out}\n{self.err}") from None
        return Done(code, self.out, self.err)


class Host:
    """A host; `pid` is its first process as seen from outside, 0 while it is switched off."""

    def __init__(self, cluster: "Cluster", name: str, address: str) -> None:
        self.cluster, self.name, self.address = cluster, name, address
        self.pid = 0
        self.namespace: str | None = None
        self.frozen = False
        self._first: subprocess.Popen[str] | None = None
        self._own: set[tuple[int, int]] = set()  # what runs on it once it is up, by number and start

    @property
    def port(self) -> str:
        """The name of its cable's end at the bridge."""
        return f"port-{self.name}"

    @property
    def card(self) -> str:
        """The address of its network card, which others remember over its boots."""
        return "02:4e:53:00:00:" + format(int(self.address.rpartition(".")[2]), "02x")

    # Power

    def boot(self) -> None:
        """Switches it on, and waits until it can be reached."""
        self.switch_on()
        self.wait_until_up()

    def switch_on(self) -> None:
        """Starts its first process, and plugs it in."""
        assert not self.pid, f"{self.name} is up"
        rack = self.cluster.rack
        assert rack is not None
        words = ["nsenter", "-t", str(rack.pid), "-m", *PYTHON, str(HERE / "host.py"), str(os.getpid())]
        environment = bare_environment()
        self._first = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
        )
        kept = [str(self.cluster.folder), str(ROOT), sys.prefix, sys.base_prefix]
        orders = {
            "name": self.name,
            "address": self.address,
            "sshd": tool("sshd"),
            "log": str(self.cluster.log),
            "keep": keys.hidden(kept, OWN_FOLDERS),
            "over": keys.over(self.cluster.folder, self.name),
        }
        self._tell(json.dumps(orders))
        said = self._heard()
        self.pid = int(said)
        self.namespace = namespace_of(self.pid)
        self.cluster.ip(
            f"link add {self.port} type veth peer name eth0 address {self.card} netns {self.pid}",
            f"link set {self.port} master bridge up",
        )
        self._tell("plugged")

    def wait_until_up(self) -> None:
        """Waits until its sshd listens."""
        if (said := self._heard()) != "ready":
            raise RuntimeError(f"{self.name} did not come up: {said}")
        self.settle()

    def settle(self) -> None:
        """Takes what runs now for the host's own: `besides` leaves it out."""
        self._own = {(process.pid, process.started) for process in self.processes()}

    def power_off(self) -> None:
        """Cuts its power: nobody hears a last word of it."""
        self.cluster.ip(f"link delete {self.port}")
        self.kill()

    def kill(self) -> None:
        """Ends all that runs on it."""
        if self._first is not None:
            if self.namespace and namespace_of(self.pid) == self.namespace:
                self._send(self.pid, signal.SIGKILL)
            self._first.kill()
            self._first.communicate()
        self._first, self.pid, self.namespace, self.frozen = None, 0, None, False

    # Cable

    def unplug(self) -> None:
        """Pulls its cable."""
        self.cluster.ip(f"link set {self.port} down")

    def plug(self) -> None:
        """Puts its cable back."""
        self.cluster.ip(f"link set {self.port} up")

    # What runs

    def freeze(self) -> None:
        """Stops all that runs on it, as a hypervisor does."""
        deadline = time.monotonic() + 2.0
        while moving := [process.pid for process in self.processes() if process.state != "T"]:
            assert time.monotonic() < deadline, f"{self.name} does not freeze: {moving}"
            for pid in moving:
                self._send(pid, signal.SIGSTOP)
            time.sleep(0.01)
        self.frozen = True

    def thaw(self) -> None:
        """Lets it go on."""
        for process in self.processes():
            self._send(process.pid, signal.SIGCONT)
        self.frozen = False

    def processes(self) -> list[Process]:
        """Returns all that runs on it."""
        return running_in({self.namespace})[self.namespace] if self.namespace else []

    def besides(self, processes: list[Process]) -> list[Process]:
        """Returns those that did not run already when it had come up."""
        return [process for process in processes if (process.pid, process.started) not in self._own]

    def find(self, *words: str) -> list[Process]:
        """Returns the processes that have all these words among their arguments."""
        return [process for process in self.processes() if all(word in process.argv for word in words)]

    def start(self, *argv: str | Path, env: Mapping[str, str] | None = None, folder: Path = ROOT) -> Started:
        """Starts a command on it, with the environment of a new login and what `env` adds."""
        return Started(self, tuple(map(str, argv)), bare_environment(**(env or {})), folder)

    def run(
        self, *argv: str | Path, env: Mapping[str, str] | None = None, folder: Path = ROOT, limit_s: float = 60.0
    ) -> Done:
        """Runs a command on it to its end."""
        return self.start(*argv, env=env, folder=folder).wait(limit_s)

    def must(self, *argv: str | Path, env: Mapping[str, str] | None = None, limit_s: float = 60.0) -> str:
        """Runs a command that must succeed, and returns what it said."""
        done = self.run(*argv, env=env, limit_s=limit_s)
        assert done.code == 0, f"{self.name}: {shlex.join(map(str, argv))} ended with {done.code}: {done.err}{done.out}"
        return done.out

    # Files

    def file(self, path: Path | str) -> Path:
        """Returns where this process finds a file as the host sees it."""
        return Path(f"/proc/{self.pid}/root") / Path(path).relative_to("/")

    def put_over(self, source: Path, target: Path) -> None:
        """Lets this host alone see one file or folder in the place of another."""
        self.must("mount", "--bind", source, target)

    def _send(self, pid: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def _tell(self, line: str) -> None:
        assert self._first is not None
        assert self._first.stdin is not None
        print(line, file=self._first.stdin, flush=True)

    def _heard(self) -> str:
        assert self._first is not None
        assert self._first.stdout is not None
        return self._first.stdout.readline().strip()


def _text(file: "IO[bytes]") -> str:
    return os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace")
