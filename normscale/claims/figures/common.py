"""What the figures of claims share: colours, marks, axes."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from normscale.claims.claim import Claim
from normscale.claims.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"post": "#d62728", "pre": "#2ca02c", "deepnorm": "#1f77b4"}
OTHERS = ("#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#e377c2", "#bcbd22")
GREY = "#555555"
MARKS = {"trained": "o", "stuck": "X", "diverged": "v", "undecided": "D"}
SHOWN_FROM = -0.5  # gaps below this are drawn at the lower edge
DPI = 130
DASHES: tuple[Any, ...] = ("-", "--", "-.", (0, (8, 2, 1, 2, 1, 2)), ":")
FILLS: tuple[Any, ...] = ("full", "none", "left", "bottom", "right")  # "none" is a word of matplotlib's


def new(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def colour(claim: Claim, arm: str) -> str:
    """Returns an arm's colour: that of its scheme, so that it is the same in every figure.

    A scheme with options of its own (a wrong constant, say) is another scheme.
    """
    others = [kind for name in claim.arms if (kind := _kind(claim, name)) not in COLOURS]
    kind = _kind(claim, arm)
    return COLOURS.get(kind) or OTHERS[list(dict.fromkeys(others)).index(kind) % len(OTHERS)]


def variant(claim: Claim, arm: str) -> int:
    """Returns how many earlier arms have the same colour: each has dashes and marks of its own."""
    arms = list(claim.arms)
    return sum(_kind(claim, other) == _kind(claim, arm) for other in arms[: arms.index(arm)])


def dashes(number: int) -> Any:
    """Returns the line style of a variant."""
    return DASHES[number % len(DASHES)]


def fill(number: int) -> str:
    """Returns how much of a mark of a variant is filled: what became of a run is the mark's shape."""
    return str(FILLS[number % len(FILLS)])


def depth_axis(axes: "Axes", depths: Sequence[int]) -> None:
    axes.set_xscale("log")
    # Two depths nearer than this would have their labels run into each other.
    kept = [depth for i, depth in enumerate(depths) if i == 0 or depth >= 1.3 * depths[i - 1]]
    axes.set_xticks(kept, [str(depth) for depth in kept])
    if len(kept) == 1:  # with nothing beside it, its points would be spread over the whole axis
        axes.set_xlim(kept[0] / 2, kept[0] * 2)
    axes.minorticks_off()
    axes.set_xlabel("blocks")
    plain(axes)


def log_scale(axes: "Axes") -> None:
    """Gives the axis a logarithmic scale whose numbers can be read off also where it spans about a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low < 30:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def value_axis(axes: "Axes", smallest: float, least: float, largest: float) -> None:
    """Gives the axis of numbers from 0 on, of which the least above 0 is `least`, a logarithmic scale, with 0 on it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    decade = 10 ** math.floor(math.log10(least))
    if smallest > 0:
        axes.set_xscale("log")
        axes.set_xlim(least / 1.5, largest * 1.5)
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xscale("symlog", linthresh=decade, linscale=0.5)
        axes.set_xlim(-0.3 * decade, largest * 1.5)
        axes.xaxis.set_minor_locator(NullLocator())
        powers = range(round(math.log10(decade)), math.floor(math.log10(largest * 1.5)) + 1)
        axes.set_xticks([0.0, *(10.0**power for power in list(powers)[:: -(-len(powers) // 6)])])
    if smallest > 0 and largest / least < 1e3:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def plain(axes: "Axes") -> None:
    """Gives the axes a light grid and takes the frame away where nothing is read off it."""
    axes.grid(axis="both", alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def mark_handles(results: Sequence[Result], each: str = "one seed") -> list[Any]:
    """Returns what a legend says of the marks that there are."""
    from matplotlib.lines import Line2D

    labels = {result.state.label for result in results}
    return [
        Line2D([], [], color=GREY, marker=mark, ls="", ms=6, label=f"{label} ({each})")
        for label, mark in MARKS.items()
        if label in labels
    ]


def shown(gap: float | None) -> float:
    """Returns where a gap is drawn: at the lower edge when it is not finite or far below."""
    return max(gap, SHOWN_FROM + 0.04) if gap is not None and gap == gap else SHOWN_FROM + 0.04


def _kind(claim: Claim, arm: str) -> str:
    settings = {**claim.base, **claim.arms[arm]}
    options = settings.get("model.scheme_options")
    scheme = str(settings.get("model.scheme", arm))
    return f"{scheme} {sorted(options.items())}" if options else scheme
