"""From what a person calls a run to its folder."""

import difflib
import os
import time
from pathlib import Path

from normscale.config.sources import plain
from normscale.errors import BadInput
from normscale.progress import duration
from normscale.tracking.spool import SPOOL

LATEST = "latest"
MAX_NAMED = 10  # candidates that an error lists


def find_run(word: str, runs: Path) -> Path:
    """Returns the folder of a run: a path, a whole name in `runs`, `latest`, or the beginning or a part of one name.

    Raises:
        BadInput: no run is called so, or several are; the message names them.
    """
    shown = plain(word)
    path = Path(word)
    if os.sep in word or word in (".", ".."):
        path = path.parent if path.name == SPOOL else path
        if _has_spool(path):
            return path
        raise BadInput(f"{shown}: is not the folder of a run (it holds no {SPOOL}); name one of {runs}")
    names = _names(runs)
    if not names:
        if _has_spool(path):
            return path
        raise BadInput(f"{shown}: there are no runs in {runs}; train one, or name another folder with --runs")
    if word in names:
        return runs / word
    if word == LATEST:
        return runs / newest_first(names, runs)[0]
    if _has_spool(path):
        return path
    found = [name for name in names if name.startswith(word)] or [name for name in names if word in name]
    if len(found) == 1 and word:
        return runs / found[0]
    if found:
        raise BadInput(_ambiguous(shown, newest_first(found, runs), runs))
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.4)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise BadInput(f"{shown}: no run in {runs} is called so{hint} ({len(names)} runs; `{LATEST}` is the newest)")


def newest_first(names: list[str], runs: Path) -> list[str]:
    """Returns names of runs by when their records were last written, the newest first."""
    return sorted(names, key=lambda name: (-_written(runs / name), name))


def _ambiguous(shown: str, names: list[str], runs: Path) -> str:
    now = time.time()
    width = max(len(name) for name in names[:MAX_NAMED])
    ages = [f"  {name:<{width}}  written {duration(now - _written(runs / name))} ago" for name in names[:MAX_NAMED]]
    more = [f"  and {len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    return "\n".join([f"{shown}: {len(names)} runs in {runs} are called so; write more of the name:", *ages, *more])


def _names(runs: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(runs) if _has_spool(Path(entry.path)))
    except OSError:
        return []


def _has_spool(folder: Path) -> bool:
    try:
        return (folder / SPOOL).is_file()
    except (OSError, ValueError):
        return False


def _written(folder: Path) -> float:
    try:
        return (folder / SPOOL).stat().st_mtime
    except OSError:
        return 0.0
