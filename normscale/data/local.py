"""Text on this machine: a .txt file, a folder of .txt files, or a .jsonl file.

The files are read here and not by the loaders of `datasets`: those drop line ends, decode, and fill a cache that has
to be kept in step with the files.
"""

import json
import os
import stat
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from normscale.config.schema import DataConfig
from normscale.config.sources import plain
from normscale.data.rows import Row, Source, document, held_by_position
from normscale.errors import DataError, nearest

ALLOWED = "a .txt file, a folder of .txt files, a .jsonl file, 'embedded' or 'hub:owner/name'"
BLOCK_BYTES = 4096
MAX_COMPARED, MAX_NAME = 1000, 255  # of the names that a suggestion is looked for in


def read(config: DataConfig) -> Source:
    """Returns the rows of a local source: blocks of text files, or lines of a JSONL file."""
    source = config.source
    path = Path(os.path.expanduser(source))
    if not source.strip():
        raise DataError(f"data.source: {source!r} names nothing; give {ALLOWED}")
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        missing = f"{shown(source)} does not exist{suggest(path, 'embedded')}"
        raise DataError(f"data.source: {missing}; give {ALLOWED}") from None
    except OSError as e:
        raise _unreadable(source, path, e) from None
    if stat.S_ISDIR(mode):
        return _text(config, _texts_in(source, path))
    if not stat.S_ISREG(mode):
        raise DataError(f"data.source: {source!r} is not a regular file; give {ALLOWED}")
    match path.suffix.lower():
        case ".txt":
            return _text(config, [path])
        case ".jsonl":
            split = f"by line: a share of {config.held_out:g}, evenly spread"
            return Source(_lines(config, path), split)
        case suffix:
            raise DataError(f"data.source: {source!r} has the extension {suffix!r}; give {ALLOWED}")


def _text(config: DataConfig, paths: list[Path]) -> Source:
    try:
        total = sum(path.stat().st_size for path in paths)
    except OSError as e:
        raise _unreadable(config.source, paths[0], e) from None
    if not total:
        raise DataError(f"data.source: {config.source!r} is empty (0 bytes); give a file with text")
    # A short text is cut finer, so that its smaller split gets at least one block.
    block = max(1, min(BLOCK_BYTES, int(total * min(config.held_out, 1 - config.held_out))))
    split = f"by position: a share of {config.held_out:g} of the blocks of {block} bytes, evenly spread"
    return Source(_blocks(config, paths, block), split)


def _blocks(config: DataConfig, paths: list[Path], size: int) -> Iterator[Row]:
    index = 0
    for path in paths:
        try:
            name = plain(path.name, 300)  # a name need not be text
            with open(path, "rb") as file:
                start = 0
                while text := file.read(size):
                    yield Row(f"{name}:{start}", text, held_by_position(index, config.held_out))
                    index, start = index + 1, start + len(text)
        except OSError as e:
            raise _unreadable(config.source, path, e) from None


def _lines(config: DataConfig, path: Path) -> Iterator[Row]:
    index, name = 0, plain(path.name, 300)
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark is no part of the text
                if line.strip():
                    text = _field(config, line, f"{name}:{number}")
                    yield Row(f"{name}:{number}", text, held_by_position(index, config.held_out))
                    index += 1
    except OSError as e:
        raise _unreadable(config.source, path, e) from None


def _field(config: DataConfig, line: bytes, place: str) -> bytes:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise DataError(f"data.source: {place} is not UTF-8 (byte {e.start}); convert the file to UTF-8") from None
    except json.JSONDecodeError as e:
        raise DataError(
            f"data.source: {place} is not JSON ({e.msg}, column {e.colno}); mend or remove the line"
        ) from None
    except (ValueError, RecursionError) as e:  # an integer of thousands of digits, thousands of nested brackets
        raise DataError(f"data.source: {place} is not JSON that can be read ({e}); mend or remove the line") from None
    if not isinstance(record, dict):
        raise DataError(f"data.source: {place} is not a JSON object; each line is to be like {{{config.field!r}: ...}}")
    if config.field not in record:
        raise DataError(
            f"data.field: {config.field!r} is not in {place}{_nearest(config.field, record)} (the line has: "
            f"{_some(record) or 'nothing'}); set data.field"
        )
    return document(record[config.field], place, config.field)


def _texts_in(source: str, folder: Path) -> list[Path]:
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".txt" and path.is_file())
    except OSError as e:
        raise _unreadable(source, folder, e) from None
    if not found:
        raise DataError(f"data.source: the folder {source!r} holds no .txt file (subfolders are not read); add one")
    return found


def _unreadable(source: str, path: Path, error: OSError) -> DataError:
    place = "" if str(path) == source else f" at {plain(str(path), 300)}"
    return DataError(
        f"data.source: {shown(source)} cannot be read{place} ({error.strerror}); check path and permissions"
    )


def suggest(path: Path, *others: str) -> str:
    """Returns where a path that is not there leads, or which name beside it, or of the others, is nearest."""
    try:
        if path.is_symlink():
            return f" (a link to {plain(os.readlink(path), 200)}, which is not there)"
        names = os.listdir(path.parent)
    except (OSError, ValueError):
        names = []
    return _nearest(path.name, [*names, *others])


def _nearest(word: str, names: Iterable[str]) -> str:
    """Returns the nearest name as `nearest` does; of very many or very long ones only some are looked at."""
    return nearest(word[:MAX_NAME], [name for name in islice(names, MAX_COMPARED) if len(name) <= MAX_NAME])


def _some(names: Iterable[str]) -> str:
    """Returns the first names on one line, as much as a message holds."""
    first = [plain(name, 40) for name in islice(names, 9)]
    return ", ".join(first[:8]) + ", ..." * (len(first) > 8)


def shown(source: str) -> str:
    """Returns the source as a message shows it: quoted, and cut where it is too long to be a name."""
    return plain(repr(source), 200)
