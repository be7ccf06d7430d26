"""One host as the doctor sees it: a process, over ssh or here, that answers questions line by line."""

import concurrent.futures
import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from launch.processes import die_with_parent
from launch.remote import why_unreachable

ASKED = Path(__file__).with_name("doctor_host.py")
LOADER = "import sys; exec(compile(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())), 'doctor_host', 'exec'))"
MARK = b"normscale-doctor "
PINGS = 5


class NoAnswer(Exception):
    """Why a host does not answer, in a line."""


class Line:
    """A connection to one host; questions are answered one after the other.

    Args:
        name: what the host is called in messages.
        argv: what starts Python there with LOADER.
        folder: where it starts, for a process here.
    """

    def __init__(self, name: str, argv: Sequence[str], folder: str | None = None) -> None:
        self.name = name
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._words: list[str] = []
        try:
            self._process = subprocess.Popen(
                argv,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509 (prctl alone is called)
            )
        except OSError as error:
            raise NoAnswer(f"{argv[0]} cannot be started ({error.strerror})") from None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._overhearing = threading.Thread(target=self._overhear, args=(self._process.stderr,), daemon=True)
        for thread in (
            threading.Thread(target=self._hear, args=(self._process.stdout,), daemon=True),
            self._overhearing,
        ):
            thread.start()
        source = ASKED.read_bytes()
        self._send(f"{len(source)}\n".encode() + source)

    def ask(self, do: str, limit_s: float, /, **words: Any) -> Any:
        """Returns the answer to a question of doctor_host.

        Raises:
            NoAnswer: none came in time, the connection ended, or the question failed there.
        """
        self._send(json.dumps({"do": do, **words}).encode() + b"\n")
        try:
            answer = self._answers.get(timeout=limit_s)
        except queue.Empty:
            self.close()
            raise NoAnswer(f"no answer within {limit_s:g} s; is it on, and reachable from here?") from None
        if answer is None:
            raise NoAnswer(self._why())
        if "failed" in answer:
            raise NoAnswer(f"a check failed there ({answer['failed']})")
        return answer["answer"]

    def offset(self, limit_s: float) -> tuple[float, float]:
        """Returns by how many seconds the clock there is ahead of ours, and how far off that may be.

        The reading was made some time between question and answer, so the quickest exchange bounds it best.
        """
        best = (0.0, float("inf"))
        for _ in range(PINGS):
            asked = time.time()
            there = self.ask("clock", limit_s)
            answered = time.time()
            best = min(best, (there - (asked + answered) / 2, (answered - asked) / 2), key=lambda one: one[1])
        return best

    def close(self) -> None:
        """Ends the connection, and what runs at its other end."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it is gone, as the end of its answers says
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _hear(self, stream: IO[bytes]) -> None:
        for raw in stream:
            _, mark, said = raw.partition(MARK)
            if mark:
                self._answers.put(json.loads(said))
        self._answers.put(None)

    def _overhear(self, stream: IO[bytes]) -> None:
        for raw in stream:
            self._words = [*self._words, raw.decode(errors="replace").rstrip()][-20:]

    def _why(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "the connection was lost"
        self._overhearing.join(2)  # its last words may still be on their way
        return why_unreachable(self.name, code, self._words)


def on_each(lines: Sequence[Line], ask: Callable[[Line], Any]) -> dict[str, Any]:
    """Returns what each host answers, all asked at once; what a host could not answer is a NoAnswer."""

    def one(line: Line) -> Any:
        try:
            return ask(line)
        except NoAnswer as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(max(1, len(lines))) as pool:
        return {line.name: answer for line, answer in zip(lines, pool.map(one, lines), strict=True)}
