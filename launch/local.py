"""Runs ranks on this machine and answers for them: the first failure's exit code, one line why, nothing left behind."""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from launch.command import Command
from normscale.arguments import debugging, say_error

GRACE_S = 20.0  # what survivors of a failure, or of a signal, have to end by themselves
POLL_S = 0.2
SINK = b"normscale.tracking.mlflow_sink"  # ends by itself once it has replayed what is there
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

AGENT_LINE = re.compile(rb"^[EWIC]\d{4} \d\d:\d\d:\d\d\.\d+ .*torch/distributed/")
AGENT_FAILURE = re.compile(rb"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
AGENT_SUMMARY = re.compile(rb"^  rank +: (\d+) |^  exitcode +: (-?\d+) ")
AGENT_FRAME = re.compile(rb'^  File ".*accelerate/commands/')


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, its exit code, and its one line."""

    rank: int
    exit_code: int
    error: str


@dataclass
class AgentNoise:
    """Parts what the ranks say on stderr from the log and the traceback of the agent that watches them.

    The agent reports every failed rank with a page of its own stack, below the one line that says why. It raises once
    all ranks have ended, so its traceback and all that follows is noise.
    """

    held: list[bytes] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)
    over: bool = False

    def feed(self, line: bytes) -> list[bytes]:
        """Returns the lines to pass on, now that this one is known."""
        if self.over or AGENT_LINE.match(line):
            self.dropped.append(line)
            return []
        if line.startswith(b"Traceback (most recent call last)"):
            passed, self.held = self.held, [line]
            return passed
        if not self.held:
            return [line]
        if AGENT_FRAME.match(line):
            self.over = True
            self.dropped += [*self.held, line]
            self.held = []
            return []
        self.held.append(line)
        return [] if line.startswith(b" ") else self.flush()

    def flush(self) -> list[bytes]:
        """Returns what is still held back; it was not the agent's."""
        passed, self.held = self.held, []
        return passed

    def failure(self) -> Failure | None:
        """Returns the first failed rank as the agent saw it, for ranks that left no status."""
        for line in self.dropped:
            if found := AGENT_FAILURE.search(line):
                return _failure(int(found[2]), int(found[1]))
        return None

    def killed(self) -> Failure | None:
        """Returns the first rank that a signal killed, if any, but not one that the agent itself asked to end."""
        rank = 0
        for line in self.dropped:
            if found := AGENT_SUMMARY.match(line):
                if found[1]:
                    rank = int(found[1])
                elif int(found[2]) < 0 and -int(found[2]) != signal.SIGTERM:
                    return _failure(rank, int(found[2]))
        seen = self.failure()
        return seen if seen is not None and seen.error.startswith("was killed") else None


def _failure(rank: int, code: int) -> Failure:
    if code < 0:
        return Failure(
            rank, 1, f"was killed by {_signal_name(-code)}" + " (out of memory?)" * (code == -signal.SIGKILL)
        )
    return Failure(rank, code, f"ended with exit code {code}")


def run(command: Command, grace_s: float = GRACE_S) -> int:
    """Runs a command that starts several ranks, and returns its exit code: the first failing rank's.

    SIGINT, SIGTERM and SIGHUP are passed on to the ranks (a second one ends them at once); what has not ended after
    `grace_s` is killed, and when this returns no process of the launch is left but a sink that still replays records.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # ranks whose agent died become our children instead of getting away
    with tempfile.TemporaryDirectory(prefix="normscale-launch-") as folder:
        environ = command.environ(os.environ) | {"NORMSCALE_STATUS_DIR": folder}
        process = subprocess.Popen(
            command.argv,
            env=environ,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C reaches us alone, and we pass it on once
            preexec_fn=_die_with_parent(),  # noqa: PLW1509 (no thread runs yet)
        )
        noise = AgentNoise()
        assert process.stderr is not None
        pump = threading.Thread(target=_pump, args=(process.stderr, noise), daemon=True)
        pump.start()
        signals = _forward_signals(process)
        try:
            _wait(process, Path(folder), signals, grace_s)
        finally:
            end_descendants(min(5.0, grace_s))
        pump.join(timeout=5)
        if debugging():
            sys.stderr.buffer.write(b"".join(noise.dropped))
        if signals:
            say_error(f"stopped by {_signal_name(signals[0])}")
            return 128 + signals[0]
        killed = noise.killed()
        if killed is not None and not (Path(folder) / f"rank{killed.rank}.status").exists():
            return _report(process.returncode, None, noise, killed)  # what the others met then is not the reason
        return _report(process.returncode, first_failure(Path(folder)), noise, noise.failure())


def first_failure(folder: Path) -> Failure | None:
    """Returns the earliest failure that the ranks left a status of; rank 0's where it failed for the same reason."""
    found: list[tuple[int, Failure]] = []
    for path in folder.glob("rank*.status"):
        status = json.loads(path.read_text(encoding="utf-8"))
        if status["exit_code"] != 0:
            found.append((status["t"], Failure(status["rank"], status["exit_code"], status["error"])))
    if not found:
        return None
    first = min(found, key=lambda pair: pair[0])[1]
    same = [one for _, one in found if (one.exit_code, one.error) == (first.exit_code, first.error)]
    return min(same, key=lambda one: one.rank)


def _report(returncode: int, failure: Failure | None, noise: AgentNoise, seen: Failure | None) -> int:
    """Returns the exit code of the launch, from what a rank left or else from what the agent saw.

    Rank 0 has said its own line already.
    """
    if failure is not None:
        if failure.rank != 0:
            say_error(f"rank {failure.rank}: {failure.error}")
        return failure.exit_code
    if returncode == 0:
        return 0
    if seen is not None:
        say_error(f"rank {seen.rank} {seen.error}; the other ranks were stopped")
        return seen.exit_code
    sys.stderr.buffer.write(b"".join(noise.dropped))  # the launcher itself failed: its words are all there is
    sys.stderr.flush()
    say_error(f"accelerate launch failed with exit code {returncode}")
    return 1


def _wait(process: subprocess.Popen[bytes], folder: Path, signals: list[int], grace_s: float) -> None:
    deadline: float | None = None
    while process.poll() is None:
        if deadline is None and (signals or first_failure(folder)):
            deadline = time.monotonic() + grace_s
        if len(signals) > 1 or (deadline is not None and time.monotonic() > deadline):
            process.kill()
        time.sleep(POLL_S)


def _forward_signals(process: subprocess.Popen[bytes]) -> list[int]:
    """Passes signals on to the agent, which passes them on to its ranks; returns the list they are noted in."""
    noted: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        if len(noted) == 1:
            process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    return noted


def _pump(stream: IO[bytes], noise: AgentNoise) -> None:
    def say(lines: list[bytes]) -> None:
        with contextlib.suppress(OSError):  # nobody reads our stderr; the ranks must be able to write theirs
            sys.stderr.buffer.write(b"".join(lines))
            sys.stderr.buffer.flush()

    for line in stream:
        say(noise.feed(line))
    say(noise.flush())


def end_descendants(wait_s: float = 5.0) -> None:
    """Ends what a launch left running, politely first. A sink is left alone."""
    for number, limit_s in ((signal.SIGTERM, wait_s), (signal.SIGKILL, wait_s)):
        left = descendants(os.getpid())
        for pid in left:
            _signal(pid, number)
        deadline = time.monotonic() + limit_s
        while left and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)
            _reap()
            left = descendants(os.getpid())
        if not left:
            return


def descendants(root: int) -> list[int]:
    """Returns the living processes below `root`, without sinks and what they started."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it ended meanwhile
            if state not in "ZX":
                parents[int(folder.name)] = int(parent)
    found, generation = [], [root]
    while generation:
        generation = [pid for pid, parent in parents.items() if parent in generation and not _is_sink(pid)]
        found += generation
    return found


def _is_sink(pid: int) -> bool:
    try:
        return SINK in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> Callable[[], None] | None:
    """Returns what makes a child get SIGTERM when this process is killed outright, where the system can do that."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
