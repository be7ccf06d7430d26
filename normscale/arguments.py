"""What the command lines of normscale and of the launchers share: one-line errors and exit codes."""

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from normscale.errors import BadInput, NormscaleError, nearest

Say = Callable[[str], None]


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are BadInput instead of a usage text on stderr."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message} (see {self.prog} --help)")


def say_error(lines: str) -> None:
    """Prints what went wrong on stderr, each line marked as ours (a file may hold several mistakes, one a line)."""
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
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, MemoryError):
        return 1, "out of memory; make the model, the batch or the context smaller"
    name = type(error).__name__
    text = " ".join(str(error).split())
    what = f"{name}: {text[:300]}" if text else name
    return 1, f"this is a bug in normscale: {what}; traceback: {_keep_traceback(error)}"


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


def run_command(command: Callable[[], int], say: Say = say_error) -> int:
    """Returns the exit code of a command, having said in one line why it failed."""
    try:
        code = command()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 0
    except (Exception, KeyboardInterrupt) as error:
        if debugging():
            traceback.print_exception(error)
        code, line = exit_code_of(error)
        say(line)
    return code
