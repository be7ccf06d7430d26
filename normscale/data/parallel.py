"""Parallel text: two files whose lines are translations of each other, each plain or .gz.

Lines are bytes, as in every other corpus: no decoding, no normalising. Nothing but the line end is taken off, so that
a carriage return stays.
"""

import gzip
import os
import zlib
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple

from normscale.config.sources import plain
from normscale.data.local import MAX_COMPARED, MAX_NAME, shown, suggest
from normscale.errors import DataError, nearest

BRING = (
    "; such text is not part of the project: bring two files, line n of one the translation of line n of the other (a"
    " configuration of configs/train says in its first lines which text it means)"
)


class Pair(NamedTuple):
    """One line of each file, and its number from 1."""

    line: int
    source: bytes
    target: bytes


def files_of(base: str, languages: tuple[str, str], key: str = "data.source") -> tuple[Path, Path]:
    """Returns the files of both languages: `base`.en, or `base`.en.gz where there is no such file.

    Raises:
        DataError: one is not there. `key` is where the configuration says `base`.
    """
    for ending in (f".{language}{packed}" for language in languages for packed in ("", ".gz")):
        if base.endswith(ending) and os.path.isfile(os.path.expanduser(base)):
            raise DataError(
                f"{key}: {shown(base)} is one of the files; drop its ending, {ending!r}: {key} is the path before the"
                " endings of both, which data.languages gives"
            )
    source, target = (_file(base, language, key) for language in languages)
    return source, target


def read(files: tuple[Path, Path], key: str = "data.source") -> Iterator[Pair]:
    """Yields the pairs of lines; to the end, so that files that do not fit each other are seen.

    Raises:
        DataError: a file cannot be read, or one has more lines than the other.
    """
    counts = [0, 0]
    for source, target in zip_longest(*(_lines(path, key) for path in files)):
        counts[0] += source is not None
        counts[1] += target is not None
        if source is not None and target is not None:
            yield Pair(counts[0], source, target)
    if counts[0] != counts[1]:
        a, b = (plain(str(path), 300) for path in files)
        raise DataError(
            f"{key}: {a} has {counts[0]} lines and {b} has {counts[1]}; line n of one is to be the translation of line"
            " n of the other; give files of equally many lines"
        )


def _file(base: str, language: str, key: str) -> Path:
    plain_path = Path(f"{os.path.expanduser(base)}.{language}")
    packed_path = plain_path.with_name(f"{plain_path.name}.gz")
    for path in (plain_path, packed_path):
        if os.path.isfile(path):
            return path
    missing, meaning = shown(f"{base}.{language}"), f"{key} is the path before the ending, and data.languages the two"
    for path, ending in ((plain_path, ""), (packed_path, ".gz")):
        if os.path.exists(path):
            what = "a folder" if os.path.isdir(path) else "not a regular file"
            raise DataError(f"{key}: {shown(f'{base}.{language}{ending}')} is {what}; {meaning} endings of files")
    near = suggest(plain_path) if os.path.islink(plain_path) else _near(plain_path, language)
    raise DataError(f"{key}: neither {missing} nor the same with .gz is a file{near}; {meaning} endings{BRING}")


def _near(path: Path, language: str) -> str:
    """Returns the nearest name beside a path that is not there, of those of this language; the other side is no mend.

    Of very many or very long names only some are looked at.
    """
    try:
        names = os.listdir(path.parent)
    except (OSError, ValueError):
        return ""
    fit = (name for name in names if name.removesuffix(".gz").endswith(f".{language}") and len(name) <= MAX_NAME)
    return nearest(path.name[:MAX_NAME], list(islice(fit, MAX_COMPARED)))


def _lines(path: Path, key: str) -> Iterator[bytes]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for line in file:
                number += 1
                yield line.removesuffix(b"\n")
    except (OSError, EOFError, zlib.error) as e:  # the last two: .gz files that are cut or damaged
        reason = getattr(e, "strerror", None) or str(e)
        raise DataError(
            f"{key}: {plain(str(path), 300)} cannot be read after line {number} ({reason}); mend the file, or check"
            " its permissions"
        ) from None
