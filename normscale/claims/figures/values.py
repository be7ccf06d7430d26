"""Numbers arm by arm: every seed as a dot, the mean with its 95 % interval, the bars that were expected."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.figures.common import GREY, colour, new, plain
from normscale.claims.fit import mean
from normscale.claims.judges.values import WHEN, values_of
from normscale.claims.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS, PANELS = 2, 6
ROW_IN, AROUND_IN = 0.28, 1.1  # inches: of one arm, and around a panel
DECADES = 1.5  # from this spread on the axis is logarithmic

Rows = list[tuple[str, str, list[float]]]
"""(arm, its label, one number for each seed)"""


def draw(claim: Claim, results: Sequence[Result]) -> "Figure | None":
    """One panel for each number that is judged, one row for each arm (and depth) that has it."""
    judged = [e for e in claim.expect if isinstance(e, Value)]
    asked = {(e.number, e.when): Value("", e.number, when=e.when) for e in judged}
    panels = [(*key, rows) for key, wanted in asked.items() if (rows := _rows(claim, results, wanted))]
    panels = panels[:PANELS]
    if not panels:
        return None
    lines = -(-len(panels) // COLUMNS)
    most = max(len(rows) for _, _, rows in panels)
    figure = new(6.2 * min(COLUMNS, len(panels)) + 1.5, lines * (AROUND_IN + ROW_IN * most))
    for place, (number, when, rows) in enumerate(panels):
        axes = figure.add_subplot(lines, min(COLUMNS, len(panels)), place + 1)
        bars = [(e.arm, e.at, e.above, e.below) for e in judged if (e.number, e.when, e.than) == (number, when, None)]
        _panel(axes, claim, rows, [bar for _, _, *both in bars for bar in both if bar is not None])
        title = claim.numbers.get(number, number) + WHEN[when]
        axes.set_title(title[:1].upper() + title[1:], loc="left", fontsize=11)
    return figure


def _rows(claim: Claim, results: Sequence[Result], wanted: Value) -> Rows:
    rows: Rows = []
    for arm, label in claim.labels.items():
        for depth in sorted({result.cell.depth for result in results if result.cell.arm == arm}):
            at = Value(arm, wanted.number, at=depth, when=wanted.when)
            known = [value for value in values_of(at, results) if value is not None and math.isfinite(value)]
            if known:
                rows.append((arm, f"{label}, {depth} blocks" if depth else label, known))
    return rows


def _panel(axes: "Axes", claim: Claim, rows: Rows, bars: Sequence[float]) -> None:
    shown = [value for _, _, values in rows for value in values]
    for y, (arm, _, values) in enumerate(rows):
        ink, middle = colour(claim, arm), mean(values)
        axes.plot(values, [y] * len(values), "o", ms=5, mfc="none", mec=ink, mew=1.1)
        if middle.lo is not None and middle.hi is not None:
            axes.plot([middle.lo, middle.hi], [y, y], color=ink, lw=1.6)
        axes.plot(middle.value, y, "|", ms=11, mec=ink, mew=2)
    for bar in dict.fromkeys(bars):
        axes.axvline(bar, color=GREY, lw=0.9, ls=":")
    if min(shown) > 0 and max(shown) / min(shown) > 10**DECADES and all(bar > 0 for bar in bars):
        axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [label for _, label, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    plain(axes)
