"""A launch through DeepSpeed's launcher and pdsh: watched from here, with a lifeline to every rank."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from launch.command import Command
from launch.environment import trimmed
from launch.failures import Failure, first_of, of_exit
from launch.hostfile import Host
from launch.job import ENDING_S, Limits
from launch.local import report, stops
from launch.pdsh_guard import put_guard
from launch.processes import adopt_orphans, die_with_parent, end_descendants
from launch.rank import MARK
from launch.ssh import Place
from launch.supervise import POLL_S, Outcome, heed, passed_on, pump
from normscale.arguments import to_stderr

SSH_ARGS = "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
SIGNAL_S = 10.0  # what a signal may take to its rank

# What DeepSpeed and pdsh say of their own work; the ranks and we say what counts.
_NOISE = re.compile(
    rb"^\[[\d-]{10} [\d:,]+\] \[(INFO|WARNING|ERROR)\] \[(launch|runner|multinode_runner|\w+_accelerator|logging)\.py:"
    rb"|^pdsh@|^Timeout, server |^W\d{4} .*torch/|^Setting ds_accelerator"
)
_LABEL = re.compile(rb"^[\w.-]+: $")  # of a host, before what pdsh passes on of it
_LOST = re.compile(rb"^pdsh@[^:]+: ([^:]+): ssh exited with exit code 255")


class PdshJob:
    """One launch; `run` returns its exit code. `ranks` is whether these are ranks, which fail together."""

    def __init__(
        self, command: Command, hosts: Sequence[Host], place: Place, limits: Limits, ranks: bool = True
    ) -> None:
        self._command, self._place, self._limits = command, place, limits
        self._host_of = [host.name for host in hosts for _ in range(host.slots)]
        self._together = ranks
        self._pids: dict[int, int] = {}
        self._failures: list[Failure] = []
        self._well: set[int] = set()
        self._noise: list[bytes] = []
        self._noted: list[int] = []

    def run(self) -> int:
        """Returns the exit code of the launch: the first failing rank's."""
        with tempfile.TemporaryDirectory(prefix="normscale-pdsh-") as folder:
            env = self._command.environ(trimmed(os.environ))
            return self._run({**env, "PATH": f"{put_guard(Path(folder))}:{env.get('PATH', os.defpath)}"})

    def _run(self, env: dict[str, str]) -> int:
        adopt_orphans()
        process = subprocess.Popen(
            self._command.argv,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509 (prctl alone is called)
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        pumps = [
            threading.Thread(target=pump, args=(process.stdout, self._out), daemon=True),
            threading.Thread(target=self._read, args=(process.stderr,), daemon=True),
        ]
        for thread in pumps:
            thread.start()
        heed(self._note)
        try:
            self._wait(process, process.stdin)
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()
            end_descendants()
        for thread in pumps:
            thread.join(5)
        return self._result(process.wait())

    def _result(self, code: int) -> int:
        """Says why the launch failed, unless rank 0 has said it, and returns its exit code."""
        failure = first_of(self._failures)
        silent = sorted(set(range(len(self._host_of))) - self._well)
        if code == 0 and failure is None and silent and not self._noted:  # pdsh's own word is not enough
            failure = Failure(silent[0], 1, "ended without a word").at(self._host_of[silent[0]])
        if failure is not None and not self._together and not stops(self._noted):
            to_stderr(
                failure.error if failure.rank < 0 else f"{failure.host}: what it ran of the claim {failure.error}"
            )
            return failure.exit_code
        outcome = Outcome(failure.exit_code if failure else abs(code), failure, b"".join(self._noise))
        return report(outcome, self._noted, "DeepSpeed's launcher")

    def _wait(self, process: subprocess.Popen[bytes], lifeline: IO[bytes]) -> None:
        """Waits for the end; what has not ended in time is killed, and at last the connections are."""
        told, deadline, killed = 0, float("inf"), False
        while process.poll() is None:
            fresh, told = self._noted[told:], len(self._noted)
            for number in fresh:
                self._signal(passed_on(number))
            now = time.monotonic()
            if len(stops(self._noted)) > 1:
                deadline = min(deadline, now)
            elif stops(fresh):
                deadline = min(deadline, now + self._limits.grace_s)
            elif self._together and self._failures and not stops(self._noted):
                deadline = min(deadline, now + self._limits.after_failure_s)
            if now >= deadline and killed:
                with contextlib.suppress(OSError):
                    lifeline.close()
                return
            if now >= deadline:
                killed, deadline = True, now + ENDING_S
                self._signal(signal.SIGKILL)
            time.sleep(POLL_S)

    def _signal(self, number: int) -> None:
        """Sends a signal to every rank: neither pdsh nor DeepSpeed's launcher would pass it on."""
        ranks: dict[str, list[int]] = {}
        for rank, pid in sorted(self._pids.items()):
            ranks.setdefault(self._host_of[rank], []).append(pid)
        sent = []
        for host, pids in ranks.items():
            words = shlex.join(["kill", f"-{number}", *map(str, pids)])
            argv = self._place.ssh_to(host, f"{words} 2>/dev/null", lost_after_s=self._limits.lost_after_s)
            sent.append(
                subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
        deadline = time.monotonic() + SIGNAL_S
        for one in sent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(max(0.0, deadline - time.monotonic()))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(number)

    def _out(self, text: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stdout.buffer.write(b"".join(self._kept(text)))
            sys.stdout.buffer.flush()

    def _kept(self, text: bytes) -> list[bytes]:
        """Returns what is the ranks', line by line."""
        kept = []
        for line in text.splitlines(keepends=True):
            if _NOISE.match(line):
                self._noise.append(line)
            else:
                kept.append(line)
        return kept

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            before, mark, status = line.partition(MARK)
            if mark:
                before = b"" if _LABEL.match(before) else before
                with contextlib.suppress(ValueError, KeyError):  # another rank's words got between
                    self._heed(status)
            elif lost := _LOST.match(line):
                host = lost[1].decode(errors="replace")
                self._failures.append(Failure(-1, 1, f"{host}: the connection was lost", t=time.time_ns()))
            for text in self._kept(before):
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.buffer.write(text)
                    sys.stderr.buffer.flush()

    def _heed(self, status: bytes) -> None:
        told = json.loads(status)
        rank = told["rank"]
        host = self._host_of[rank] if rank < len(self._host_of) else "?"
        if "pid" in told:
            self._pids[rank] = told["pid"]
            return
        self._pids.pop(rank, None)
        if "error" not in told and told["code"] == 0 and not self._together:
            self._well.add(rank)
        elif "error" not in told and told["code"] != 0:
            failure = of_exit(rank, told["code"]).at(host)
            if not (failure.killed and any(not one.followed and not one.stopped for one in self._failures)):
                self._failures.append(failure)  # else it was ended for the sake of those
        elif told.get("exit_code", 0) != 0:
            self._failures.append(Failure(rank, told["exit_code"], told["error"], t=told["t"]).at(host))
        elif "exit_code" in told:
            self._well.add(rank)
