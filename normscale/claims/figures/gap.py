"""Whether models train, by depth."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from normscale.claims.claim import Claim
from normscale.claims.figures.common import (
    GREY,
    MARKS,
    SHOWN_FROM,
    colour,
    dashes,
    depth_axis,
    fill,
    mark_handles,
    new,
    shown,
    variant,
)
from normscale.claims.fit import mean
from normscale.claims.results import MAIN, Result
from normscale.claims.state import AT_UNIGRAM
from normscale.tracking.record import TRAINED_NATS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = 4  # depths whose losses are shown


def draw(claim: Claim, results: Sequence[Result]) -> "Figure | None":
    """Gap to the unigram entropy over depth, and the losses behind it at some depths."""
    from matplotlib.lines import Line2D

    main = [result for result in results if result.cell.role in MAIN and result.state.gap is not None]
    if not main:
        return None
    depths = sorted({result.cell.depth for result in main})
    below = _losses_shown(main, depths)
    figure = new(11, 7.2)
    grid = figure.add_gridspec(2, len(below), height_ratios=(1.7, 1))
    axes = figure.add_subplot(grid[0, :])
    top = max(max((shown(r.state.gap) for r in main), default=0.0) * 1.12, 0.5)
    axes.axhspan(SHOWN_FROM, AT_UNIGRAM, color="#000000", alpha=0.06, lw=0)
    axes.axhline(0, color=GREY, lw=1)
    axes.text(0.005, -0.015, "unigram entropy", transform=_mixed(axes), va="top", color=GREY, fontsize=9)
    axes.axhline(TRAINED_NATS, color=GREY, lw=0.8, ls=":")
    axes.text(0.005, TRAINED_NATS + 0.01, "trained from here up", transform=_mixed(axes), color=GREY, fontsize=9)
    axes.text(0.005, SHOWN_FROM + 0.02, "stuck or diverged", transform=_mixed(axes), color=GREY, fontsize=9)
    handles: list[Any] = []
    for number, arm in enumerate(claim.arms):
        own = [result for result in main if result.cell.arm == arm]
        if not own:
            continue
        ink, own_number = colour(claim, arm), variant(claim, arm)
        at = sorted({result.cell.depth for result in own})
        middle = [mean([shown(r.state.gap) for r in own if r.cell.depth == depth]).value for depth in at]
        line = {"ls": dashes(own_number), "color": ink, "lw": 1.8, "label": claim.labels[arm]}
        axes.plot(at, middle, **line)
        handles.append(Line2D([], [], marker="o", ms=6.5, **line, **_filled(ink, own_number)))
        for result in own:
            x = result.cell.depth * 1.025 ** (number - (len(claim.arms) - 1) / 2)
            mark = MARKS.get(result.state.label, "o")
            axes.plot(x, shown(result.state.gap), mark, ms=6.5, **_filled(ink, own_number))
    depth_axis(axes, depths)
    axes.set_ylim(SHOWN_FROM, top)
    axes.set_ylabel("unigram entropy minus held-out loss (nats)")
    axes.set_title("How much more than byte frequencies was learnt, by depth", loc="left", fontsize=12)
    handles += mark_handles(main)
    axes.legend(handles=handles, frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    first: Any = None
    for column, depth in enumerate(below):
        first = _losses(figure.add_subplot(grid[1, column], sharey=first), claim, main, depth, column == 0) or first
    return figure


def _filled(ink: str, number: int) -> dict[str, Any]:
    """Returns the marks of a variant, in matplotlib's words."""
    return {"fillstyle": fill(number), "mfc": ink, "mfcalt": "white", "mec": ink, "mew": 1.2}


def _losses_shown(main: Sequence[Result], depths: Sequence[int]) -> list[int]:
    """Returns the depths whose losses are shown: those that several arms share, and the deepest."""
    several = [depth for depth in depths if len({result.cell.arm for result in main if result.cell.depth == depth}) > 1]
    shown = several if len(several) >= PANELS - 1 else depths
    return _few(shown, PANELS) if depths[-1] in shown else [*_few(shown, PANELS - 1), depths[-1]]


def _losses(axes: "Axes", claim: Claim, results: Sequence[Result], depth: int, leftmost: bool) -> "Axes":
    """The training losses of every arm at one depth, with the unigram entropy."""
    for result in results:
        if result.cell.depth != depth or result.record is None or "loss_train" not in result.record.series:
            continue
        series, arm = result.record.series["loss_train"], result.cell.arm
        style: Any = {"ls": dashes(variant(claim, arm)), "color": colour(claim, arm)}
        axes.plot(series.steps, series.values, lw=1.1, alpha=0.75, **style)
        axes.axhline(result.record.start["data"]["unigram_nats"], color=GREY, lw=0.8)
    axes.set_ylim(1.8, 6.2)
    axes.set_title(f"{depth} blocks", fontsize=10)
    axes.set_xlabel("step")
    if leftmost:
        axes.set_ylabel("training loss (nats)")
    else:
        axes.tick_params(labelleft=False)
    return axes


def _mixed(axes: "Axes") -> Any:
    return axes.get_yaxis_transform()


def _few(items: Sequence[int], n: int) -> list[int]:
    """Returns at most n items spread over all, the first and the last among them."""
    if len(items) <= n:
        return list(items)
    return [items[round(i * (len(items) - 1) / (n - 1))] for i in range(n)]
