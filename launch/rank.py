"""`python -m launch.rank WORDS`: one rank, started by a launcher that is not ours, with its words byte for byte.

WORDS is base64 of JSON: `words` (those of `normscale train`), `env` (variables to add), `watch`, `parts`. DeepSpeed's
launcher puts its arguments through two shells, and variables into a command line; base64 passes unharmed. With `parts`
N it is no rank of training, but runs part RANK + 1 of N of a claim (1: the whole), `words` being those of
`normscale claim run`.

With `watch`, standard input is a lifeline, through ssh, to the launcher's host: its end is the rank's end. The number
of the rank's process, and later how it ended, are told in marked lines on stderr.
"""

import base64
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.command import CLAIM, ENTRY, threads
from launch.failures import could_not_tell
from launch.processes import adopt_orphans, die_with_parent, end_descendants

MARK = b"\x1enormscale-rank "
ENDING_S = 5.0
TICK_S = 0.5


def encoded(words: Sequence[str], env: Mapping[str, str], watch: bool, parts: int | None = None) -> str:
    """Returns the argument that `main` reads back."""
    job = {"words": list(words), "env": dict(env), "watch": watch, "parts": parts}
    text = json.dumps(job, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode()


def decoded(text: str) -> dict[str, Any]:
    """Returns what `encoded` was given."""
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text))
    return found


def main(argv: Sequence[str]) -> int:
    """Returns the exit code of the rank."""
    job = decoded(argv[0])
    number, here = int(os.environ.get("RANK", "0")), os.environ.get("LOCAL_SIZE", "1")
    env = dict(os.environ)
    env["PATH"] = f"{os.path.dirname(sys.executable)}:{env.get('PATH', os.defpath)}"
    if job["parts"] is None:
        command = [sys.executable, *ENTRY, *job["words"]]
        own = {"OMP_NUM_THREADS": str(threads(int(here), env | job["env"])), "LOCAL_WORLD_SIZE": here}
    else:
        command, own = [sys.executable, *CLAIM, *job["words"], *_part(number, job["parts"])], {}
        del env["RANK"]  # what a claim starts are no ranks
    env |= own | job["env"]
    if not job["watch"]:
        os.execve(command[0], command, env)
    return _watched(command, env, number)


def _part(number: int, parts: int) -> list[str]:
    return [] if parts == 1 else ["--part", f"{number + 1}/{parts}"]


def _watched(command: Sequence[str], env: Mapping[str, str], number: int) -> int:
    parent = os.getppid()
    adopt_orphans()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # whoever sends it sends it to the rank, too
    with tempfile.TemporaryDirectory(prefix="normscale-rank-") as folder:
        rank = subprocess.Popen(
            command,
            env={**env, "NORMSCALE_STATUS_DIR": folder},
            stdin=subprocess.DEVNULL,
            preexec_fn=_fresh(die_with_parent()),  # noqa: PLW1509 (no thread runs)
        )
        _tell({"rank": number, "pid": rank.pid})
        while rank.poll() is None and _has_lifeline():
            if os.getppid() != parent:  # DeepSpeed's launcher was killed
                break
        end_descendants(ENDING_S)
        code = rank.wait()
        path = Path(folder, f"rank{number}.status")  # parts of a claim leave none
        told = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rank": number, "code": code}
        if code == 0 and not path.exists() and could_not_tell(Path(folder)):
            told = {"rank": number, "exit_code": 0, "error": ""}
        _tell(told)
    return code if code >= 0 else 128 - code


def _fresh(then: Callable[[], None] | None) -> Callable[[], None]:
    """Returns what prepares the rank's process: SIGTERM is as it was, and `then`."""

    def prepare() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if then is not None:
            then()

    return prepare


def _has_lifeline() -> bool:
    """Returns whether the launcher is still there, after a moment of waiting for its end."""
    ready, _, _ = select.select([0], [], [], TICK_S)
    try:
        return not ready or os.read(0, 4096) != b""
    except OSError:
        return False


def _tell(status: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        # The first line ends what the rank may have left unfinished, of which pdsh passes on nothing after a NUL.
        os.write(2, MARK + b"\n" + MARK + json.dumps(status).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
