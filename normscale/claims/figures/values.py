"""Numbers arm by arm: every seed as a dot, the mean with its 95 % interval, and where it was expected."""

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.figures.common import GREY, colour, new, plain, value_axis
from normscale.claims.judges.values import RATES, WHEN, averaged, values_of
from normscale.claims.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS, PANELS = 2, 6
ROW_IN, AROUND_IN = 0.28, 1.1  # inches: of one arm, and around a panel
DECADES = 1.5  # from this spread on the axis is logarithmic
LINE = 90  # letters of a line below the figure, for each column of panels
WRAP = 40  # letters of a line of a panel's title: labels of arms take room from it
EXPECTED = "#2e9e5b"

Bars = list[tuple[str, int, float | None, float | None]]
"""(arm, depth, above, below) of each expectation about a number itself; where two numbers are compared there is no such
place."""

Rows = list[tuple[str, int, str, list[float]]]
"""(arm, depth, its label, one number for each seed)"""


def draw(claim: Claim, results: Sequence[Result]) -> "Figure | None":
    """One panel for each number that is judged or controlled, one row for each arm (and depth) that has it."""
    judged = [e for e in claim.expect if isinstance(e, Value)]
    shown = (*judged, *(e for e in claim.control if isinstance(e, Value)))
    asked = {(e.number, e.when): Value("", e.number, when=e.when) for e in shown}
    panels = [(*key, rows) for key, wanted in asked.items() if (rows := _rows(claim, results, wanted))]
    if not panels:
        return None
    panels, further = panels[:PANELS], panels[PANELS:]
    lines = -(-len(panels) // COLUMNS)
    most = max(len(rows) for _, _, rows in panels)
    figure = new(6.2 * min(COLUMNS, len(panels)) + 1.5, lines * (AROUND_IN + ROW_IN * most) + 0.3)
    expected = False
    for place, (number, when, rows) in enumerate(panels):
        axes = figure.add_subplot(lines, min(COLUMNS, len(panels)), place + 1)
        bars = [(e.arm, e.at, e.above, e.below) for e in judged if (e.number, e.when, e.than) == (number, when, None)]
        _panel(axes, claim, number, rows, bars)
        expected = expected or bool(bars)
        title = claim.numbers.get(number, number) + WHEN[when]
        axes.set_title("\n".join(textwrap.wrap(title[:1].upper() + title[1:], WRAP)), loc="left", fontsize=11)
    means = {"geometric mean" if number in RATES else "mean" for number, _, _ in panels}
    said = f"Circles: one seed each. Bar: {' or '.join(sorted(means))} and 95 % interval."
    said += " Green: where it was expected." if expected else ""
    none = any(number in RATES and 0.0 in values for number, _, rows in panels for *_, values in rows)
    said += " 0: nothing was learnt while the rate rose." if none else ""
    if further:
        names = [claim.numbers.get(number, number) + WHEN[when] for number, when, _ in further]
        said += f" In the table alone: {'; '.join(names)}."
    said = "\n".join(textwrap.wrap(said, LINE * min(COLUMNS, len(panels))))
    figure.supxlabel(said, fontsize=9, color=GREY, x=0.01, ha="left")
    return figure


def _rows(claim: Claim, results: Sequence[Result], wanted: Value) -> Rows:
    rows: Rows = []
    for arm, label in claim.labels.items():
        for depth in sorted({result.cell.depth for result in results if result.cell.arm == arm}):
            at = Value(arm, wanted.number, at=depth, when=wanted.when)
            known = [value for value in values_of(at, results) if value is not None and math.isfinite(value)]
            if known:
                rows.append((arm, depth, f"{label}, {depth} blocks" if depth else label, known))
    return rows


def _panel(axes: "Axes", claim: Claim, number: str, rows: Rows, bars: Bars) -> None:
    for y, (arm, _, _, values) in enumerate(rows):
        ink, middle = colour(claim, arm), averaged(number, values)
        axes.plot(values, [y] * len(values), "o", ms=5, mfc="none", mec=ink, mew=1.1)
        if middle.lo is not None and middle.hi is not None:
            axes.plot([middle.lo, middle.hi], [y, y], color=ink, lw=1.6)
        axes.plot(middle.value, y, "|", ms=11, mec=ink, mew=2)
    own = {(arm, depth): y for y, (arm, depth, _, _) in enumerate(rows)}
    edges = [bar for arm, at, *both in bars if (arm, at) in own for bar in both if bar is not None]
    _scale(axes, [value for _, _, _, values in rows for value in values] + edges, _ends(number, rows))
    low, high = axes.get_xlim()
    for arm, at, above, below in bars:
        if (arm, at) in own:
            y, left, right = own[arm, at], low if above is None else above, high if below is None else below
            axes.fill_betweenx([y - 0.42, y + 0.42], left, right, color=EXPECTED, alpha=0.16, lw=0)
            for bar in (bar for bar in (above, below) if bar is not None):
                axes.plot([bar, bar], [y - 0.42, y + 0.42], color=EXPECTED, lw=1.2)
    axes.set_xlim(low, high)
    axes.set_yticks(range(len(rows)), [label for _, _, label, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    plain(axes)


def _ends(number: str, rows: Rows) -> list[float]:
    """Returns the ends of the intervals."""
    middles = [averaged(number, values) for _, _, _, values in rows]
    return [end for middle in middles for end in (middle.lo, middle.hi) if end is not None]


def _scale(axes: "Axes", marks: Sequence[float], ends: Sequence[float]) -> None:
    """Gives the axis room for numbers, bars and ends of intervals, and a logarithm where they are of many sizes.

    On a logarithmic axis an interval that goes down to nearly 0, or below, is cut off at the edge.
    """
    sizes = [mark for mark in marks if mark]
    if min(marks) >= 0 and sizes and max(sizes) / min(sizes) > 10**DECADES:
        sizes += [end for end in ends if end > min(sizes) / 3]
        value_axis(axes, min(marks), min(sizes), max(sizes))
        return
    everything = [*marks, *ends]
    room = 0.06 * (max(everything) - min(everything)) or abs(max(everything)) * 0.06 or 1.0
    axes.set_xlim(min(everything) - room, max(everything) + room)
