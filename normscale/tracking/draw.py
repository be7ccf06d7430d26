"""Curves as text: a sparkline on one line, a plot on a few, in Unicode or in ASCII."""

import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TextIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

WIDTH = 100  # columns that every line fits in; a narrower terminal has its own
COLOURS = {"good": "32", "bad": "31", "open": "33", "faint": "2", "strong": "1"}


@dataclass(frozen=True)
class Look:
    """What the place that is written to can show."""

    width: int = WIDTH
    unicode: bool = True
    colour: bool = False

    @property
    def bars(self) -> str:
        return "▁▂▃▄▅▆▇█" if self.unicode else "_.-:=+*#"

    @property
    def bad(self) -> str:
        """Where nothing is finite."""
        return "\N{MULTIPLICATION SIGN}" if self.unicode else "x"

    def paint(self, text: str, kind: str) -> str:
        """Returns the text in a colour, where there are any."""
        return f"\x1b[{COLOURS[kind]}m{text}\x1b[0m" if self.colour else text

    def fit(self, line: str) -> str:
        """Returns a line of plain text as it can be shown: cut to the width, in ASCII where there is nothing else."""
        if not self.unicode:
            line = line.encode("ascii", "backslashreplace").decode("ascii")
        mark = "…" if self.unicode else "..."
        return line if len(line) <= self.width else line[: self.width - len(mark)] + mark


def look_of(out: TextIO, environment: Mapping[str, str]) -> Look:
    """Returns what a stream can show: 100 columns, or a narrower terminal's; colours on a terminal alone."""
    terminal = out.isatty()
    width = min(WIDTH, max(40, shutil.get_terminal_size((WIDTH, 24)).columns)) if terminal else WIDTH
    encoding = (getattr(out, "encoding", None) or "ascii").lower().replace("-", "").replace("_", "")
    colour = terminal and not environment.get("NO_COLOR") and environment.get("TERM", "") not in ("", "dumb")
    return Look(width, encoding.startswith("utf"), colour)


def span_of(*arrays: ArrayLike) -> tuple[float, float]:
    """Returns the smallest and the largest finite value of all; NaN twice where there is none."""
    finite = [values[np.isfinite(values)] for values in (np.asarray(array, dtype=float) for array in arrays)]
    joined = np.concatenate(finite) if finite else np.array([])
    return (float(joined.min()), float(joined.max())) if joined.size else (math.nan, math.nan)


def resampled(values: ArrayLike, width: int) -> NDArray[np.float64]:
    """Returns `width` values in order: each several times over, or means of neighbours.

    In a mean, what is not finite counts only where it is alone.

    Shape: values [n]; result [width], empty where n is 0.
    """
    array, width = np.asarray(values, dtype=float), max(1, width)
    if array.size <= width:
        return array[np.arange(width) * array.size // width] if array.size else array
    means = np.full(width, np.nan)
    for i, part in enumerate(np.array_split(array, width)):
        finite = part[np.isfinite(part)]
        means[i] = finite.mean() if finite.size else part[0]
    return means


def sparkline(values: ArrayLike, look: Look, width: int, span: tuple[float, float] | None = None) -> str:
    """Returns values as a line of bars over `span` (their own by default); a flat line stands in the middle."""
    means = resampled(values, width)
    low, high = span or span_of(means)
    line = ""
    for value in means:
        if not math.isfinite(value):
            line += look.bad
            continue
        share = _share(value, low, high) if high > low else 0.5
        line += look.bars[min(len(look.bars) - 1, int(share * len(look.bars)))]
    return line


def _share(value: float, low: float, high: float) -> float:
    """Returns how far from low to high a value lies, from 0 to 1; none is so large that it overflows."""
    value = min(high, max(low, value))
    return (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5


def log_span(low: float, high: float) -> bool:
    """Returns whether a span reads better in logarithms: all of it positive, and more than one order of magnitude."""
    return low > 0 and high / low > 10


Points = list[tuple[float, float]]


class Plot:
    """A few curves over one x axis, `height` lines high. Points beyond the y span stand at its edge."""

    def __init__(self, look: Look, height: int, x: tuple[float, float], y: tuple[float, float], label: int = 8) -> None:
        self.look, self.height, self.x, self.label = look, height, x, label
        self.y = y if y[1] > y[0] else (y[0] - 0.5, y[0] + 0.5)
        self.columns = look.width - label - 2
        self._dots = np.zeros((height * 4, self.columns * 2), dtype=bool)
        self._marks: dict[tuple[int, int], str] = {}
        self._levels: dict[int, str] = {}

    def curve(self, points: Points) -> None:
        """Draws a line through the points; it is broken where one is not finite."""
        before: tuple[int, int] | None = None
        for x, y in points:
            if not math.isfinite(y):
                before = None
                continue
            at = self._place(x, y, 2, 4)
            for row, column in _between(before or at, at):
                self._dots[row, column] = True
            before = at

    def marks(self, points: Points, mark: str) -> None:
        """Puts a mark at each point that is finite."""
        for x, y in points:
            if math.isfinite(y):
                self._marks[self._place(x, y, 1, 1)] = mark

    def level(self, y: float, label: str) -> None:
        """Draws a dashed line across, where there is room, with a label beside the axis."""
        self._levels[self._place(self.x[0], y, 1, 1)[0]] = label

    def lines(self) -> list[str]:
        """Returns the plot with its axes."""
        edge, corner, tick = ("│", "└", "┤") if self.look.unicode else ("|", "+", "+")
        dash, floor = ("╌", "─") if self.look.unicode else ("-", "-")
        labels = {0: f"{self.y[1]:.3g}", self.height - 1: f"{self.y[0]:.3g}"} | self._levels
        lines = []
        for row in range(self.height):
            cells = ""
            for column in range(self.columns):
                dots = self._dots[4 * row : 4 * row + 4, 2 * column : 2 * column + 2]
                rest = dash if row in self._levels and column % 2 == 0 else " "
                cells += self._marks.get((row, column)) or (self._cell(dots) if dots.any() else rest)
            label = labels.get(row, "")
            lines.append(f"{label:>{self.label}} {tick if label else edge}{cells}".rstrip())
        first, last = f"step {self.x[0]:.0f}", f"{self.x[1]:.0f}"
        below = first + " " * max(1, self.columns - len(first) - len(last)) + last
        return [*lines, " " * (self.label + 1) + corner + floor * self.columns, " " * (self.label + 2) + below]

    def _place(self, x: float, y: float, across: int, down: int) -> tuple[int, int]:
        """Returns row and column, of cells or of the dots in them."""
        columns, rows = self.columns * across, self.height * down
        width = self.x[1] - self.x[0] or 1.0
        column = round((x - self.x[0]) / width * (columns - 1))
        row = round((1 - _share(y, *self.y)) * (rows - 1))
        return row, min(columns - 1, max(0, column))

    def _cell(self, dots: NDArray[np.bool_]) -> str:
        if not self.look.unicode:
            return "*"
        bits = ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (3, 1))  # the order of Braille's eight dots
        return chr(0x2800 + sum(1 << bit for bit, at in enumerate(bits) if dots[at]))


def _between(a: tuple[int, int], b: tuple[int, int]) -> Iterable[tuple[int, int]]:
    """Returns the dots of a straight line, both ends included."""
    length = max(abs(b[0] - a[0]), abs(b[1] - a[1]), 1)
    for i in range(length + 1):
        yield round(a[0] + (b[0] - a[0]) * i / length), round(a[1] + (b[1] - a[1]) * i / length)
