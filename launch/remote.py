"""One host of a launch, as the launcher sees it: an ssh connection with an agent at its other end."""

import contextlib
import json
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from launch import wire
from launch.hostfile import Host
from launch.processes import die_with_parent

KEPT = 40  # lines of ssh's stderr
SSH_FAILED = 255

_SAYS = (  # what ssh says, what it means, and the mend; {ssh} stands for `ssh HOST`
    (
        r"could not resolve hostname|name or service not known",
        "unknown host: mend the name, /etc/hosts or ~/.ssh/config",
    ),
    (r"connection refused", "connection refused: start sshd there, or give its port in ~/.ssh/config"),
    (r"timed? ?out|no route to host|unreachable", "no answer: is it on, and is its network reachable from here?"),
    (r"host key verification failed", "its host key is not known here: connect once by hand ({ssh})"),
    (
        r"permission denied|too many authentication|no supported authentication",
        "no key is accepted: ssh-copy-id {name}",
    ),
)
_OUTPUT = threading.Lock()

Event = tuple["Remote", dict[str, Any] | None]


class Remote:
    """A connection to one host; `events` gets what its agent says, and None when the connection is over."""

    def __init__(self, host: Host, argv: Sequence[str], events: "queue.SimpleQueue[Event]") -> None:
        self.host = host
        self.hello: dict[str, Any] | None = None
        self.answer: dict[str, Any] | None = None
        self.reached: str | None = None
        self.end: dict[str, Any] | None = None
        self.lost: str | None = None
        self.heard = time.monotonic()
        self.labelled = False  # whether its lines get its name, to tell them from those of other hosts
        self.writing = False  # to a reader of ours that takes its time: no silence of the host
        self._events = events
        self._open: set[bytes] = set()  # streams of which a line has begun
        self._words: list[str] = []
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for us to pass on
            preexec_fn=die_with_parent(),  # noqa: PLW1509 (prctl alone is called)
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True),
        ]
        for thread in self._readers:
            thread.start()

    @property
    def over(self) -> bool:
        """Returns whether nothing more is to come."""
        return self.end is not None or self.lost is not None

    def send(self, **message: Any) -> None:
        """Sends a message, if anybody is still there."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(wire.line(**message))
            self._process.stdin.flush()

    def give_up(self, reason: str) -> None:
        """Takes the host for lost."""
        if not self.over:
            self.lost = reason
        self._process.kill()

    def close(self, wait_s: float) -> None:
        """Ends the connection; the agent, if it still runs, ends all that it started."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def silent_s(self) -> float:
        """Returns for how long the agent has said nothing."""
        return 0.0 if self.writing else time.monotonic() - self.heard

    def why_lost(self) -> str:
        """Returns why the connection ended before the ranks did."""
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "the connection was lost"
        words = self.words()
        if self.hello is None:
            return why_unreachable(self.host.name, code, words)
        if code == SSH_FAILED:
            return f"the connection was lost ({words[-1] if words else 'its agent or its network is gone'})"
        return f"its agent was killed or failed (exit code {code})"

    def words(self) -> list[str]:
        """Returns what ssh and the agent themselves said on stderr."""
        self._readers[1].join(timeout=2)
        return self._words

    def _read(self, stream: IO[bytes]) -> None:
        for kind, payload in wire.frames(stream):
            self.heard = time.monotonic()
            if kind == wire.MESSAGE:
                self._events.put((self, json.loads(payload)))
                continue
            self.writing = True
            out = sys.stdout if kind == wire.OUT else sys.stderr
            with _OUTPUT, contextlib.suppress(OSError, ValueError):  # nobody reads; the ranks must be able to write
                out.flush()
                out.buffer.write(self._shown(kind, payload))
                out.buffer.flush()
            self.writing, self.heard = False, time.monotonic()
        self._events.put((self, None))

    def _shown(self, kind: bytes, payload: bytes) -> bytes:
        """Returns what ranks wrote on a stream as a person gets to see it."""
        if not self.labelled:
            return payload
        label = f"{self.host.name}: ".encode()
        begun = kind in self._open
        (self._open.discard if payload.endswith((b"\n", b"\r")) else self._open.add)(kind)
        lines = payload.splitlines(keepends=True)
        return b"".join(line if begun and not i else label + line for i, line in enumerate(lines))

    def _listen(self, stream: IO[bytes]) -> None:
        for raw in stream:
            self._words = [*self._words, raw.decode(errors="replace").rstrip()][-KEPT:]


def why_unreachable(name: str, code: int, words: Sequence[str]) -> str:
    """Returns in one line why no agent answered, with the mend, from ssh's exit code and what stood on stderr."""
    text = "\n".join(words)
    last = next((word.strip() for word in reversed(words) if word.strip()), f"exit code {code}")
    if code == SSH_FAILED:
        for pattern, says in _SAYS:
            if re.search(pattern, text, re.I):
                return says.format(name=name, ssh=f"ssh {name}")
        return f"ssh failed: {last}"
    if re.search(r"No module named '?(launch|normscale)", text):
        return "the folder there is no checkout of normscale; give it with --remote-dir"
    if re.search(r"No module named", text):
        return f"normscale's Python there lacks a package ({last}); run make test there, or give --remote-python"
    if re.search(r"\bcd\b", text):
        return f"no such folder there ({last}); give it with --remote-dir"
    if code in (126, 127):
        return f"no such Python there ({last}); install normscale there, or give --remote-python"
    return f"its agent ended with exit code {code}: {last}"
