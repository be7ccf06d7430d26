"""What the command lines of normscale and of the launchers share: one-line errors and exit codes."""

import argparse
import errno
import os
import re
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

from normscale.errors import BadInput, NormscaleError, nearest

Say = Callable[[str], None]

LOST_RANK = "lost the connection to another rank"
"""How the line of a rank begins that failed only because another one was gone."""

STOPPED_ELSEWHERE = "stopped by a signal to another rank"
"""How the line of a rank begins that ended because another one was told to, on this host or on another."""

_NO_MEMORY = re.compile(r"can't allocate memory|cannot allocate memory|out of memory|not enough memory", re.I)
_RANKS = re.compile(r"gloo|nccl|process ?group|TCPStore|c10d", re.I)
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|time[d ]*-?out|remote ?error|remote process|"
    r"closed by peer|failed to (recv|send)",
    re.I,
)


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end; whatever ends well on Ctrl-C does so here too."""

    def __init__(self, number: int, line: str | None = None) -> None:
        super().__init__(line or f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@contextmanager
def stoppable() -> Iterator[None]:
    """Turns the first SIGTERM, SIGUSR1 or SIGHUP of the block into Stopped; further ones do not disturb the ending.

    A signal that is ignored (nohup) stays so, but SIGUSR1, which launchers ignore for themselves and leave to ranks.
    """
    quiet = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_IGN]
    numbers = [each for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP) if each not in quiet]

    def stop(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    before = [(number, signal.signal(number, stop)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are BadInput instead of a usage text on stderr."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message} (see {self.prog} --help)")


def whole(word: str) -> int:
    """Returns the whole number that a word on the command line stands for."""
    try:
        return int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number; give e.g. 4") from None


def number(word: str) -> float:
    """Returns the number that a word on the command line stands for."""
    try:
        return float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number; give e.g. 0.5") from None


def to_stderr(lines: str) -> None:
    """Says something on stderr, each line marked as ours (a file may hold several mistakes, one a line).

    Where nothing can be said (stderr is closed, a file on a full disk, a pipe that nobody reads) nothing is: a rank
    does not end for want of a line.
    """
    if sys.stderr is None:  # print would take stdout
        return
    with suppress(OSError, ValueError):
        for line in lines.splitlines():
            print(f"normscale: {line}", file=sys.stderr, flush=True)


def refuse_unknown(word: str, known: Sequence[str], what: str) -> None:
    """Raises BadInput with the nearest name if `word` is not one of the known commands."""
    if word not in known:
        raise BadInput(f"{word!r} is not {what}{nearest(word, list(known))} (one of: {', '.join(known)})")


def exit_code_of(error: BaseException) -> tuple[int, str]:
    """Returns the exit code and the words for anything that ended a command.

    A mistake of ours keeps its traceback in a file that they name, so that it is neither lost nor in the way.
    """
    if isinstance(error, NormscaleError):
        return error.exit_code, str(error)
    if isinstance(error, Stopped):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    name = type(error).__name__
    text = " ".join(str(error).split())
    if _is_out_of_memory(error, text):
        return 1, "out of memory; make the model, the batch or the context smaller"
    if is_lost_rank(error):
        return 1, f"{LOST_RANK}; the first rank that failed says why"
    what = f"{name}: {text[:300]}" if text else name
    return 1, f"this is a bug in normscale: {what}; traceback: {_keep_traceback(error)}"


def is_lost_rank(error: BaseException) -> bool:
    """Returns whether a connection to another rank broke, or waiting for it took too long."""
    text = " ".join(str(error).split())
    named = _RANKS.search(f"{type(error).__name__} {text}") is not None
    return isinstance(error, RuntimeError) and named and _LOST.search(text) is not None


def _is_out_of_memory(error: BaseException, text: str) -> bool:
    """Returns whether memory ran out; torch says so with errors of its own, on the CPU by their text alone."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and _NO_MEMORY.search(text) is not None)


def _keep_traceback(error: BaseException) -> str:
    """Returns where the traceback was written."""
    lines = traceback.format_exception(error)
    try:
        descriptor, path = tempfile.mkstemp(prefix="normscale-traceback-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError:
        return "not written (no writable temporary folder); set NORMSCALE_DEBUG=1 to see it"
    return path


def debugging() -> bool:
    """Returns whether the user asked for tracebacks."""
    return os.environ.get("NORMSCALE_DEBUG", "") not in ("", "0")


def typed(command: str, *options: str) -> str:
    """Returns what a person types for a command of ours: make in the checkout, where nothing has to be on the PATH."""
    checkout = all(Path(name).exists() for name in ("Makefile", "normscale/cli.py", "launch/local.py"))
    if not checkout:
        return shlex.join(["normscale", command, *options])
    words = shlex.join(options)
    quoted = shlex.quote(words) if set(words) & set('"$`\\') else f'"{words}"'
    return f"make {command} ARGS={quoted}" if options else f"make {command}"


class _Lasting:
    """A standard stream that may be lost at any time: what cannot be said is dropped, and what goes on goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        self.lost = self.lost or error
        with suppress(OSError, ValueError):  # what is still buffered goes where writing works
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            self._stream.flush()


@contextmanager
def _lasting_streams() -> Iterator[_Lasting]:
    """Makes stdout and stderr outlive their readers and full disks for the block; gives stdout.

    A stream that was closed before we started (`>&-`) becomes /dev/null, so that no other file gets its number.
    """
    before = sys.stdout, sys.stderr
    if None in before:  # the lowest free number is the one that is missing
        while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(null, True)
        os.close(null)
    out, err = (_Lasting(stream or open(os.devnull, "w", encoding="utf-8")) for stream in before)  # noqa: SIM115
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


def run_command(command: Callable[[], int], say: Say = to_stderr) -> int:
    """Returns the exit code of a command, having said in one line why it failed.

    The code is that of the command even where nobody reads its output any more, as after `head`.
    """
    with _lasting_streams() as out:
        code = _run(command, say)
        out.flush()
        if out.lost is not None and not isinstance(out.lost, BrokenPipeError):
            to_stderr(f"stdout: some output was lost ({out.lost.strerror})")
    return code


def _run(command: Callable[[], int], say: Say) -> int:
    try:
        return command()
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 0
    except (Exception, KeyboardInterrupt) as error:
        if debugging():
            traceback.print_exception(error)
        code, line = exit_code_of(error)
        say(line)
        return code
