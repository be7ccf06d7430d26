"""Real text that is present everywhere: the source of Python's own standard library."""

import os
import platform
import sysconfig
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from normscale.config.schema import DataConfig
from normscale.data.rows import Row, Source
from normscale.errors import DataError

# Installed packages, caches, tests (repetitive, often not shipped), and one generated file of prose that would make up
# a fifth of the default sample.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data"}
)
# Written when Python is built or installed, so they differ between machines with the same version of Python.
GENERATED = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "config-")


def read(config: DataConfig) -> Source:
    """Returns the standard library's files in an order that mixes packages, split by file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = library_files(root)
    if not names:
        raise DataError(
            f"data.source: 'embedded' needs the source of Python's standard library and {root} holds none; "
            "install it, or point data.source at a text file"
        )
    return Source(
        rows=_rows(root, names, config.held_out),
        split=f"by file: held out where a hash of the path is below {config.held_out:g}",
        origin={"python": platform.python_version()},
    )


def library_files(root: Path) -> list[str]:
    """Returns the relative paths of the library's source files, in the order of a hash of each path."""
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [x for x in subfolders if x not in SKIPPED_FOLDERS and not x.startswith(GENERATED)]
        names += [
            Path(folder, x).relative_to(root).as_posix()
            for x in files
            if x.endswith(".py") and not x.startswith(GENERATED)
        ]
    return sorted(names, key=lambda name: (_share("order", name), name))


def held_out(name: str, share: float) -> bool:
    """Returns whether the file is held out. It depends on nothing but the path and the share."""
    return _share("split", name) < share


def _share(purpose: str, name: str) -> float:
    # Two purposes, two independent hashes: with one, the training files would all come after the held-out ones.
    return int.from_bytes(sha256(f"{purpose}:{name}".encode()).digest()[:6], "big") / 2**48


def _rows(root: Path, names: list[str], share: float) -> Iterator[Row]:
    for name in names:
        try:
            text = (root / name).read_bytes()
        except OSError as e:
            raise DataError(
                f"data.source: 'embedded' cannot read {root / name} ({e.strerror}); mend Python's installation, "
                "or point data.source at a text file"
            ) from None
        yield Row(name, text, held_out(name, share))
