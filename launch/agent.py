"""`python -m launch agent`: starts the ranks of one host for a launcher on another, and ends them when it is gone.

It is started over ssh and reads what to do on stdin, so that no word is quoted and no secret is on a command line.
Messages: `ask` (what the launcher wants to know before it decides), `start`, `signal`, `stop`, and `beat` every two
seconds. When stdin ends, or nothing has come for a while, every process of the job on this host is killed.
"""

import contextlib
import json
import os
import platform
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from launch.command import Command, count_gpus, is_stray
from launch.processes import end_descendants
from launch.site import answer, cannot_reach, machine
from launch.supervise import POLL_S, Supervised
from launch.wire import LOST_AFTER_S, FrameWriter
from normscale.planned import code_hash

LAST_WORDS_S = 10.0
GONE = {"gone": True}


class Agent:
    """One launch on this host, from the first message to the last rank."""

    def __init__(self) -> None:
        self._out = FrameWriter(os.dup(1))
        os.dup2(2, 1)  # whatever else prints here must not get between the frames
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._heard = time.monotonic()
        self._lost_after_s = LOST_AFTER_S
        self._ranks: Supervised | None = None
        self._failed = False
        self._held: list[socket.socket] = []  # listens where the ranks will, until they start
        threading.Thread(target=self._listen, daemon=True).start()

    def run(self) -> int:
        """Returns 0 once the ranks have ended and the launcher knows how, 1 if the launcher went away before."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._told_to_go)
        self._out.tell(hello=self._hello())
        while True:
            message = self._next()
            if message is GONE:
                end_descendants()
                if self._ranks is not None:
                    self._ranks.forget()
                if self._is_silent():
                    end_connection()
                return 1
            self._heed(message)
            if self._ranks is not None and self._watch(self._ranks):
                return 0

    def _next(self) -> dict[str, Any]:
        began = time.monotonic()
        try:
            message = self._inbox.get(timeout=POLL_S)
        except queue.Empty:
            message = {}
        now = time.monotonic()
        if now - began > POLL_S + 5.0:  # this host, or this process, was frozen: the launcher gets another chance
            self._heard = now
        if message:
            self._heard = now
        return GONE if self._is_silent() else message

    def _is_silent(self) -> bool:
        """Returns whether nothing has come for too long, though the connection has no end yet."""
        return time.monotonic() - self._heard > self._lost_after_s

    def _heed(self, message: dict[str, Any]) -> None:
        if "ask" in message:
            self._lost_after_s = message["ask"]["lost_after"]
            self._out.tell(answer=answer(message["ask"], self._held))
        elif "reach" in message:
            self._out.tell(reached=cannot_reach(*message["reach"]) or "")
        elif "start" in message:
            self._start(message["start"])
        elif self._ranks is not None and "signal" in message:
            self._ranks.signal(message["signal"])
        elif self._ranks is not None and "stop" in message:
            self._ranks.end_within(message["stop"])

    def _start(self, job: dict[str, Any]) -> None:
        while self._held:
            self._held.pop().close()
        os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
        stray = tuple(sorted(name for name in os.environ if is_stray(name)))
        command = Command(tuple(job["argv"]), job["env"], stray)
        try:
            self._ranks = Supervised(command, self._out.err, self._out.out, job["first_rank"], job["ranks"])
        except OSError as error:
            self._out.tell(end={"code": 2, "failure": None, "noise": f"{job['argv'][0]}: {error.strerror}"})

    def _watch(self, ranks: Supervised) -> bool:
        """Returns whether the ranks have ended and the launcher was told."""
        ended = ranks.poll()
        if not ended and not self._failed and (failure := ranks.failure()):
            self._failed = True
            self._out.tell(failed=asdict(failure))
        if not ended:
            return False
        outcome = ranks.finish()
        first = None if outcome.failure is None else asdict(outcome.failure)
        noise = outcome.noise.decode(errors="replace")
        self._out.tell(end={"code": outcome.exit_code, "failure": first, "noise": noise})
        self._out.close(LAST_WORDS_S)
        return True

    def _hello(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "machine": machine(os.environ),
            "python": platform.python_version(),
            "code": code_hash(),
            "cores": len(os.sched_getaffinity(0)),
            "gpus": count_gpus(os.environ),
        }

    def _listen(self) -> None:
        held = b""
        while True:
            try:
                data = os.read(0, 1 << 16)
            except OSError:
                data = b""
            if not data:
                self._inbox.put(GONE)
                return
            *lines, held = (held + data).split(b"\n")
            for text in lines:
                with contextlib.suppress(ValueError):
                    self._inbox.put(json.loads(text))

    def _told_to_go(self, number: int, frame: FrameType | None) -> None:
        self._inbox.put(GONE)


def end_connection() -> None:
    """Ends the sshd that serves this agent alone: its peer is out of reach, which it may take hours to notice."""
    with contextlib.suppress(OSError):
        parent = os.getppid()
        if Path(f"/proc/{parent}/comm").read_text().startswith("sshd"):
            os.kill(parent, signal.SIGTERM)


def main() -> int:
    """Returns the exit code of the agent; leaves at once, whatever threads still wait for."""
    code = Agent().run()
    sys.stderr.flush()
    os._exit(code)
