"""What the numbers of a measurement depend on beside its arguments, as its file says: what it imports."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = "normscale.measures"


class Sources(NamedTuple):
    """The files that a measurement is made from, its own and those of this folder, and all that these import."""

    files: tuple[Path, ...]
    imported: frozenset[str]

    def imports(self, module: str) -> bool:
        """Tells whether a module, or something in it, is imported."""
        return any(name == module or name.startswith(f"{module}.") for name in self.imported)


@cache
def sources_of(file: Path) -> Sources:
    """Returns what the measurement in `file` is made from, with what its imports from this folder import in turn."""
    files: set[Path] = set()
    imported: set[str] = set()
    left = [file]
    while left:
        one = left.pop()
        if one in files or not one.is_file():
            continue
        files.add(one)
        names = set(_imports(ast.parse(one.read_text(encoding="utf-8"))))
        imported |= names
        own = (name.removeprefix(f"{PACKAGE}.") for name in names if name.startswith(f"{PACKAGE}."))
        left += [file.with_name(f"{name.partition('.')[0]}.py") for name in own]
    return Sources(tuple(sorted(files)), frozenset(imported))


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yields the full name of everything that is imported, at any place of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
