"""The ranks of one host, started through an agent of torch: what they say, which failed first, nothing left of them."""

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from launch.command import Command
from launch.failures import Failure, could_not_tell, failures_in, first_failure, left_status
from launch.noise import AgentNoise
from launch.processes import adopt_orphans, children, die_with_parent, end_descendants, send
from normscale.arguments import debugging

Say = Callable[[bytes], None]

POLL_S = 0.2
PUMPS_S = 5.0  # what the last words may take; a sink that lives on holds the pipe open
PARTIAL_S = 0.5  # how long a line may stay unfinished before it is passed on as it is
LONGEST = 1 << 16  # and how long it may get
QUIET = {} if debugging() else {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Below that, torch prints a stack of its own for each connection that ends; ranks say in a line what that means."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heed(handler: Callable[[int, FrameType | None], None]) -> None:
    """Has `handler` called for every signal that concerns a launch.

    SIGHUP and SIGINT stay ignored where they were when we started: so nohup and a shell's `&` ask for it.
    """
    for number in (*STOPS, signal.SIGUSR1):
        if number not in (signal.SIGHUP, signal.SIGINT) or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def passed_on(number: int) -> int:
    """Returns the signal that ranks get for ours: SIGTERM, which they write a checkpoint at, for all that stop us."""
    return signal.SIGTERM if number in STOPS else number


@dataclass(frozen=True)
class Outcome:
    """How the ranks of a host ended; `noise` is the agent's own words, for when nothing else says why."""

    exit_code: int
    failure: Failure | None
    noise: bytes


class Supervised:
    """A command that starts ranks, in a session of its own. Make it and poll it in the main thread."""

    def __init__(
        self, command: Command, say: Say, say_out: Say | None = None, first_rank: int | None = 0, ranks: bool = True
    ) -> None:
        """Starts the command.

        Args:
            command: what starts the ranks, its direct children.
            say: gets what the ranks write on stderr, without the agent's noise.
            say_out: gets what they write on stdout; without it they share ours, and our stdin.
            first_rank: number of the first rank of this host; None: it is what the ranks find in their environment.
            ranks: whether it starts ranks; without, it is one process that looks after what it starts (a claim).
        """
        adopt_orphans()  # ranks whose agent died become our children instead of getting away
        self._folder = tempfile.TemporaryDirectory(prefix="normscale-launch-")
        self.folder = Path(self._folder.name)
        self._noise, self._say = AgentNoise(first_rank or 0), say
        self._numbered = first_rank is not None
        self._deadline: float | None = None
        self._ranks = ranks
        status = {"NORMSCALE_STATUS_DIR": self._folder.name} if ranks else {}
        status["PET_LOG_DIR"] = f"{self._folder.name}/torch"  # torchrun would leave a folder of its own behind
        remote = say_out is not None
        self.process = subprocess.Popen(
            command.argv,
            env=QUIET | command.environ(os.environ) | status,
            stdin=subprocess.DEVNULL if remote else None,
            stdout=subprocess.PIPE if remote else None,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C reaches us alone, and we pass it on once
            preexec_fn=die_with_parent(),  # noqa: PLW1509 (prctl alone is called)
        )
        assert self.process.stderr is not None
        self._pumps = [threading.Thread(target=self._pump_lines, args=(self.process.stderr, say), daemon=True)]
        if say_out is not None:
            assert self.process.stdout is not None
            self._pumps.append(threading.Thread(target=pump, args=(self.process.stdout, say_out), daemon=True))
        for thread in self._pumps:
            thread.start()

    def poll(self) -> bool:
        """Returns whether the ranks have ended; kills them when their time is over."""
        if self.process.poll() is not None:
            return True
        if not self._numbered and (first := _first_rank(children(self.process.pid))) is not None:
            self._noise.first_rank, self._numbered = first, True
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.process.kill()
        return False

    def failure(self) -> Failure | None:
        """Returns the first failure that a rank has left a status of so far."""
        return first_failure(self.folder)

    def ends(self) -> tuple[object, ...]:
        """Returns something that is another once a further rank has ended other than well, as it or its agent tells."""
        told = sorted((failure.rank, failure.t) for failure in failures_in(self.folder))
        return (*told, self._noise.failures())

    def stopped_elsewhere(self) -> bool:
        """Returns whether ranks have ended because those of another host were told to."""
        return any(failure.stopped_elsewhere for failure in failures_in(self.folder))

    def signal(self, number: int) -> None:
        """Passes a signal on to the ranks; while there are none yet, to what starts them.

        Torch's agent would kill them 30 s after a signal, whatever they were given to save a checkpoint.
        """
        ranks = children(self.process.pid) if self._ranks else []
        for pid in ranks or [self.process.pid]:
            send(pid, number)

    def end_within(self, grace_s: float) -> None:
        """Lets the ranks end by themselves for so long; `poll` kills what is left then."""
        deadline = time.monotonic() + grace_s
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def finish(self, wait_s: float = 5.0) -> Outcome:
        """Returns how the ranks ended, having ended everything that they left behind."""
        end_descendants(wait_s)
        for thread in self._pumps:
            thread.join(timeout=PUMPS_S)
        code = self.process.wait()
        noise, seen = self._noise, self._noise.killed()
        if seen is not None and left_status(self.folder, seen.rank):
            seen = None
        # What the others met once a rank was killed is not the reason.
        failure = seen or first_failure(self.folder) or (noise.failure() if code else self._silent())
        outcome = Outcome(failure.exit_code if failure else abs(code), failure, b"".join(noise.dropped))
        self.forget()
        return outcome

    def _silent(self) -> Failure | None:
        """Returns a failure where no rank has said how it ended: an exit code of 0 alone does not mean trained."""
        if not self._ranks or any(self.folder.glob("rank*.status")):
            return None
        if (why := could_not_tell(self.folder)) is None:
            return Failure(self._noise.first_rank, 1, "ended without a word")
        line = f"{self.folder.parent}: ranks could not leave word of their end there ({why}); their exit code was 0"
        self._say(f"normscale: {line}; free some space, or set TMPDIR\n".encode())
        return None

    def forget(self) -> None:
        """Removes what was kept of the ranks, for whom nobody asks any more."""
        with contextlib.suppress(OSError):
            self._folder.cleanup()

    def _pump_lines(self, stream: IO[bytes], say: Say) -> None:
        while line := stream.readline(LONGEST):
            say(b"".join(self._noise.feed(line)))
        say(b"".join(self._noise.flush()))


def _first_rank(pids: list[int]) -> int | None:
    """Returns the number of the first rank of this host, as one of these processes has it; None: none is a rank."""
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, KeyError):
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            environ = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
            return int(environ[b"RANK"]) - int(environ[b"LOCAL_RANK"])
    return None


def pump(stream: IO[bytes], say: Say) -> None:
    """Passes on what comes, cut where lines end, so that the lines of two hosts do not run into each other."""
    held = b""
    descriptor = stream.fileno()
    while True:
        ready, _, _ = select.select([descriptor], [], [], PARTIAL_S if held else None)
        if not ready:
            say(held)
            held = b""
            continue
        data = os.read(descriptor, 1 << 16)
        if not data:
            break
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1 or (len(data) if len(held) > LONGEST else 0)
        if cut:
            say(held + data[:cut])
            held = data[cut:]
        else:
            held += data
    if held:
        say(held)
