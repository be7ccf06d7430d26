"""What every source is read as: rows of bytes, each assigned to a split before anything is joined."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import floor
from typing import NamedTuple

from normscale.errors import DataError


class Row(NamedTuple):
    """One file, block or document. `place` says where it came from, in words a person can follow."""

    place: str
    text: bytes
    held_out: bool


@dataclass(frozen=True)
class Source:
    """Rows in their final order, how they were split (a sentence), and facts about where they came from."""

    rows: Iterable[Row]
    split: str
    origin: dict[str, str] = field(default_factory=dict)


def held_by_position(index: int, share: float) -> bool:
    """Returns whether row `index` is held out: evenly spread, so that any n rows in a row hold n * share of them."""
    return floor((index + 1) * share + 0.5) > floor(index * share + 0.5)


def document(text: object, place: str, field: str) -> bytes:
    """Returns a document as UTF-8 bytes that end in a newline, so that two documents never run into one line.

    Raises:
        DataError: `text` is not a string, or holds half of a surrogate pair.
    """
    if not isinstance(text, str):
        raise DataError(
            f"data.field: {field!r} is of type {type(text).__name__} at {place}, not a string; "
            "choose a field that holds text, or mend the line"
        )
    try:
        encoded = text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise DataError(
            f"data.field: {field!r} holds half of a surrogate pair (character {e.start}) at {place}; mend the line"
        ) from None
    return encoded if not encoded or encoded.endswith(b"\n") else encoded + b"\n"
