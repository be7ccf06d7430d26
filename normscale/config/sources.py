"""Where each value of a configuration was written: a file and a line, or an override."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from normscale.errors import ConfigError, DataError

# YAML 1.1 reads 010 as eight and 1:30 as ninety; nobody who writes them in a configuration means that.
_ODD_NUMBER = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-9_.]+)+)")


def plain(text: str, limit: int = 80) -> str:
    """Returns the text on one line: what does not print is escaped, and what is too long is cut."""
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


class Sources:
    """The place of every dotted key that was written somewhere; a later place replaces an earlier one."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}
        self._missing: set[str] = set()

    def add(self, key: str, place: str, missing: bool = False) -> None:
        """Notes that `key` was written at `place`; with `missing`, that it was left open there (???)."""
        self._places[key] = place
        self._missing = {open_key for open_key in self._missing if not f"{key}.".startswith(f"{open_key}.")}
        if missing:
            self._missing.add(key)

    def update(self, other: "Sources") -> None:
        """Takes over all places of `other`."""
        for key, place in other._places.items():
            self.add(key, place, key in other._missing)

    def missing(self) -> list[str]:
        """Returns the keys that were left open and not given since."""
        return sorted(self._missing)

    def place(self, key: str) -> str | None:
        """Returns the place where this very key was written, None if it was not."""
        return self._places.get(key)

    def where(self, *keys: str) -> str:
        """Returns " (deep.yaml:12)", ready to end a message, or "" when none of the keys was written anywhere.

        Of several keys, those that were written are named; if none was, what was written inside or around the first.
        """
        places = [self._places[key] for key in keys if key in self._places]
        parent = keys[0] if keys else ""
        if not places:
            places = [place for key, place in self._places.items() if key.startswith((f"{parent}.", f"{parent}["))][:1]
        while not places and parent:
            places = [self._places[parent]] if parent in self._places else []
            parent = re.sub(r"(\.|^)[^.\[]*$|\[[^\[]*$", "", parent)
        return f" ({', '.join(dict.fromkeys(places))})" if places else ""

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Adds the place to an error raised inside that says which key it is about (its attribute `key`)."""
        try:
            yield
        except ConfigError as error:
            place = self.where(error.key) if error.key else ""
            if not place:
                raise
            raise ConfigError(f"{error}{place}", error.key) from error
        except DataError as error:
            raise DataError(f"{error}{self.where(error.key)}") from error

    def note(self, node: Any, place: Callable[[Any], str], prefix: str = "") -> None:
        """Notes the place of every key below a YAML node; `place` says it for the node of one key.

        A node that is reached twice (an alias) is noted once: elsewhere the line of the alias stands for it.

        Raises:
            ConfigError: a key is given twice or is not text, or a number is written in a form that YAML misreads.
        """
        self._note(node, place, prefix, set())

    def _note(self, node: Any, place: Callable[[Any], str], prefix: str, seen: set[int]) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        if node.id == "scalar":
            _check_number(node, place, prefix)
        elif node.id == "sequence":
            for index, item in enumerate(node.value):
                self._note(item, place, f"{prefix}[{index}]", seen)
        else:
            own: dict[str, str] = {}
            for key_node, value_node in node.value:
                key = _key(key_node, place, prefix)
                here = place(key_node)
                if key in own:
                    both = ", ".join(dict.fromkeys([own[key], here]))
                    raise ConfigError(f"{plain(key)}: given twice; remove one ({both})")
                own[key] = here
                self.add(key, here, missing=value_node.value == "???")
                self._note(value_node, place, key, seen)


def _key(node: Any, place: Callable[[Any], str], prefix: str) -> str:
    if node.id != "scalar" or not node.tag.endswith((":str", ":merge")):
        shown = plain(node.value) if node.id == "scalar" else "(a list or mapping)"
        section = f"{plain(prefix)}: " if prefix else ""
        raise ConfigError(f"{section}the key {shown} is not text; put it in quotes or remove it ({place(node)})")
    return f"{prefix}.{node.value}" if prefix else str(node.value)


def _check_number(node: Any, place: Callable[[Any], str], key: str) -> None:
    if node.style is None and node.tag.endswith((":int", ":float")) and _ODD_NUMBER.fullmatch(node.value):
        read = ("a number in base 60", "put it in quotes") if ":" in node.value else ("octal", "drop the leading zero")
        raise ConfigError(f"{plain(key)}: YAML reads {plain(node.value)} as {read[0]}; {read[1]} ({place(node)})")
