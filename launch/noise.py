"""What the agent of torch (torchrun, accelerate launch) says of its ranks, parted from what the ranks say."""

import re
import signal
from dataclasses import dataclass, field

from launch.failures import Failure, of_exit

AGENT_LINE = re.compile(rb"[EWIC]\d{4} \d\d:\d\d:\d\d\.\d+ .*torch/distributed/")
AGENT_FAILURE = re.compile(rb"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
AGENT_SUMMARY = re.compile(rb"^  rank +: (\d+) |^  exitcode +: (-?\d+) ")
AGENT_FRAME = re.compile(rb'^  File ".*(accelerate/commands/|torch/distributed/(run|launcher/api)\.py")')


def _agents_own(line: bytes) -> int | None:
    """Returns where the agent's words begin in a line: a rank's own last line may have had no end before them."""
    found = AGENT_LINE.search(line)
    return found.start() if found else None


@dataclass
class AgentNoise:
    """Parts what the ranks say on stderr from the log and the traceback of the agent that watches them.

    The agent reports every failed rank with a page of its own stack, below the one line that says why. It raises once
    all ranks have ended, so its traceback and all that follows is noise.
    """

    first_rank: int = 0  # of this host
    held: list[bytes] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)
    over: bool = False

    def feed(self, line: bytes) -> list[bytes]:
        """Returns the lines to pass on, now that this one is known."""
        own = 0 if self.over else _agents_own(line)
        if own is not None:
            self.dropped.append(line[own:])
            return [*self.flush(), line[:own] + b"\n"] if own else []
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

    def failures(self) -> int:
        """Returns how many ranks the agent has seen fail."""
        return sum(AGENT_FAILURE.search(line) is not None for line in self.dropped)

    def failure(self) -> Failure | None:
        """Returns the first failed rank as the agent saw it, for ranks that left no status."""
        for line in self.dropped:
            if found := AGENT_FAILURE.search(line):
                return of_exit(self.first_rank + int(found[2]), int(found[1]))
        return None

    def killed(self) -> Failure | None:
        """Returns the first rank that a signal killed, if any, but not one that the agent itself asked to end."""
        rank = 0
        for line in self.dropped:
            if found := AGENT_SUMMARY.match(line):
                if found[1]:
                    rank = int(found[1])
                elif int(found[2]) < 0 and -int(found[2]) != signal.SIGTERM:
                    return of_exit(rank, int(found[2]))
        seen = self.failure()
        return seen if seen is not None and seen.killed else None
