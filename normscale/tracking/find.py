"""From what a person calls a run to its folder."""

import difflib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normscale.config.sources import plain
from normscale.errors import BadInput
from normscale.progress import duration
from normscale.tracking.spool import SPOOL

FOLD = "fold.json"  # what a fold says of itself, beside the folded model
LATEST = "latest"
MAX_NAMED = 10  # candidates that an error lists
NEWEST = 3  # runs that it names where nothing is like the word
HEAD, TAIL = 2**20, 2**16  # bytes of a spool that are looked at to say what its run is


def find_run(word: str, runs: Path) -> Path:
    """Returns the folder of a run: a path, a whole name in `runs`, `latest`, the `name=` of one run, or the beginning
    or a part of one name in `runs`.

    Raises:
        BadInput: no run is called so, or several are; the message names them. Or it is a folded model.
    """
    shown = plain(word)
    path = Path(word)
    refuse_folded(path)
    if os.sep in word or word in (".", ".."):
        path = path.parent if path.name == SPOOL else path
        if _has_spool(path):
            return path
        raise BadInput(f"{shown}: is not the folder of a run (it holds no {SPOOL}); name one of {runs}")
    names = names_in(runs)
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
    labels = {name: label for name in names if (label := _label(_glance(runs / name)[0])) is not None}
    labelled = [name for name, label in labels.items() if label == word]
    found = labelled or [name for name in names if name.startswith(word)] or [name for name in names if word in name]
    if len(found) == 1 and word:
        return runs / found[0]
    if found:
        wish = "give the folder of one" if labelled else "write more of the name"
        raise BadInput(_ambiguous(shown, newest_first(found, runs), runs, wish))
    near = difflib.get_close_matches(word, dict.fromkeys([*names, *labels.values()]), n=3, cutoff=0.4)
    hint = f"; nearest: {', '.join(map(plain, near))}"
    if not near:
        some = newest_first(names, runs)[:NEWEST]
        hint = f"; the newest {'is' if len(some) == 1 else 'are'} {', '.join(some)}"
    count = f"{len(names)} run{'' if len(names) == 1 else 's'}; normscale show lists the newest"
    raise BadInput(f"{shown}: no run in {runs} is called so{hint} ({count})")


def refuse_folded(path: Path) -> None:
    """Lets every path pass but a folded model's folder, and the files in it.

    Raises:
        BadInput: it is one; the message says what can be done with it.
    """
    try:
        folder = next((folder for folder in (path, path.parent) if (folder / FOLD).is_file()), None)
    except (OSError, ValueError):
        return
    if folder is not None:
        run = plain(folder.resolve().parent.name)
        raise BadInput(
            f"{plain(str(path), 200)}: a folded model, which no command goes on with; name its run ({run}), or load it "
            f"in Python with normscale.fold.saved.load ({FOLD} in it says what was folded)"
        )


def folders_of(words: Sequence[str], runs: Path) -> dict[Path, list[str] | None]:
    """Returns {folder of runs: names of those asked for}, None standing for all of a folder.

    A word is a run, as for `find_run`, or a folder of runs, such as one brought from another machine.

    Raises:
        BadInput: a word is neither.
    """
    found: dict[Path, list[str] | None] = {}
    for word in words:
        if os.sep in word and not _has_spool(Path(word)) and names_in(Path(word)):
            found[Path(word)] = None
            continue
        run = find_run(word, runs)
        run = run.resolve() if run.name in ("", "..") else run  # the folder we stand in
        known = found.setdefault(run.parent, [])
        if known is not None and run.name not in known:
            known.append(run.name)
    return found or {runs: None}


def newest_first(names: list[str], runs: Path) -> list[str]:
    """Returns names of runs by when their records were last written, the newest first."""
    return sorted(names, key=lambda name: (-written(runs / name), name))


def _ambiguous(shown: str, names: list[str], runs: Path, wish: str) -> str:
    now = time.time()
    width = max(len(name) for name in names[:MAX_NAMED])
    told = [f"  {name:<{width}}  {_about(runs / name, now)}" for name in names[:MAX_NAMED]]
    more = [f"  and {len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    return "\n".join([f"{shown}: {len(names)} runs in {runs} are called so; {wish}:", *told, *more])


def _about(folder: Path, now: float) -> str:
    """Returns what tells a run apart at a glance: label, scheme, blocks, seed, rate, the step it reached, when."""
    start, step = _glance(folder)
    config = start.get("config")
    config = config if isinstance(config, Mapping) else {}
    model, train = config.get("model"), config.get("train")
    model = model if isinstance(model, Mapping) else {}
    optim = train.get("optim") if isinstance(train, Mapping) else None
    blocks = [f"{side}={model[side]}" for side in ("N", "M") if model.get(side)]
    rate = optim.get("lr") if isinstance(optim, Mapping) else None
    said = [
        f"'{label}'" if (label := _label(start)) is not None else "",
        str(model.get("scheme") or ""),
        " ".join(blocks),
        f"seed {config['seed']}" if "seed" in config else "",
        f"lr {rate:g}" if isinstance(rate, int | float) else "",
        f"step {step}" if step is not None else "",
        f"written {duration(now - written(folder))} ago",
    ]
    return plain(", ".join(part for part in said if part), 120)


def _label(start: Mapping[str, Any]) -> str | None:
    """Returns the `name=` that a run was given, None where it has that of all runs."""
    config = start.get("config")
    label = config.get("name") if isinstance(config, Mapping) else None
    return None if label in (None, "run") else str(label)


def _glance(folder: Path) -> tuple[dict[str, Any], int | None]:
    """Returns the first start record and the last step of a spool, without reading the whole of it."""
    try:
        with (folder / SPOOL).open("rb") as file:
            first = json.loads(file.readline(HEAD) or b"{}")
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            steps = re.findall(rb'"step":(\d+)', file.read(TAIL))
    except (OSError, ValueError, RecursionError):
        return {}, None
    start = first if isinstance(first, dict) and first.get("kind") == "start" else {}
    return start, max(map(int, steps), default=None)


def names_in(runs: Path) -> list[str]:
    """Returns the names of the runs in a folder."""
    try:
        return sorted(entry.name for entry in os.scandir(runs) if _has_spool(Path(entry.path)))
    except OSError:
        return []


def _has_spool(folder: Path) -> bool:
    try:
        return (folder / SPOOL).is_file()
    except (OSError, ValueError):
        return False


def written(folder: Path) -> float:
    """Returns when a run was last written to, in seconds since 1970; 0 where that is not known."""
    try:
        return (folder / SPOOL).stat().st_mtime
    except OSError:
        return 0.0
