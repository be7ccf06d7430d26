"""The figure of a claim, drawn from stored records alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from normscale.claims.claim import Claim, Slope
from normscale.claims.fit import mean
from normscale.claims.state import AT_UNIGRAM
from normscale.claims.verdict import Result, fit, values_of
from normscale.tracking.record import TRAINED_NATS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"post": "#d62728", "pre": "#2ca02c", "deepnorm": "#1f77b4"}
OTHERS = ("#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
GREY = "#555555"
MARKS = {"trained": "o", "stuck": "X", "diverged": "v", "undecided": "D"}
SHOWN_FROM = -0.5  # gaps below this are drawn at the lower edge
DPI = 130


def draw(claim: Claim, results: Sequence[Result], path: Path) -> bool:
    """Draws the claim's figure as a PNG; returns False, and draws nothing, where no run has a number to show."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figures: dict[str, Callable[[Claim, Sequence[Result]], Figure | None]] = {"gap": _gap, "update": _update}
    figure = figures[claim.figure](claim, [result for result in results if result.record is not None])
    if figure is None:
        return False
    FigureCanvasAgg(figure).print_png(path)
    return True


def colour(claim: Claim, arm: str) -> str:
    """Returns an arm's colour: that of its scheme, so that it is the same in every figure."""
    scheme = str(claim.arms[arm].get("model.scheme", arm))
    others = sorted({str(settings.get("model.scheme")) for settings in claim.arms.values()} - set(COLOURS))
    return COLOURS.get(scheme) or OTHERS[others.index(scheme) % len(OTHERS)]


def _gap(claim: Claim, results: Sequence[Result]) -> "Figure | None":
    """Gap to the unigram entropy over depth, and the losses behind it at some depths."""
    main = [result for result in results if result.cell.role in ("main", "control") and result.state.gap is not None]
    if not main:
        return None
    depths = sorted({result.cell.depth for result in main})
    compared = [
        depth for depth in depths if len({result.cell.arm for result in main if result.cell.depth == depth}) > 1
    ]
    shown = _few(compared or depths, 4)
    figure = _new(11, 7.2)
    grid = figure.add_gridspec(2, len(shown), height_ratios=(1.7, 1))
    axes = figure.add_subplot(grid[0, :])
    top = max(max((_shown(r.state.gap) for r in main), default=0.0) * 1.12, 0.5)
    axes.axhspan(SHOWN_FROM, AT_UNIGRAM, color="#000000", alpha=0.06, lw=0)
    axes.axhline(0, color=GREY, lw=1)
    axes.text(0.005, -0.015, "unigram entropy", transform=_mixed(axes), va="top", color=GREY, fontsize=9)
    axes.axhline(TRAINED_NATS, color=GREY, lw=0.8, ls=":")
    axes.text(0.005, TRAINED_NATS + 0.01, "trained from here up", transform=_mixed(axes), color=GREY, fontsize=9)
    axes.text(0.005, SHOWN_FROM + 0.02, "stuck or diverged", transform=_mixed(axes), color=GREY, fontsize=9)
    for number, arm in enumerate(claim.arms):
        own = [result for result in main if result.cell.arm == arm]
        if not own:
            continue
        ink, dashes = colour(claim, arm), "--" if _variant(claim, arm) else "-"
        at = sorted({result.cell.depth for result in own})
        middle = [mean([_shown(r.state.gap) for r in own if r.cell.depth == depth]).value for depth in at]
        axes.plot(at, middle, dashes, color=ink, lw=1.8, label=claim.labels[arm])
        for result in own:
            x = result.cell.depth * 1.025 ** (number - (len(claim.arms) - 1) / 2)
            filled = "none" if _variant(claim, arm) else ink
            mark = MARKS.get(result.state.label, "o")
            axes.plot(x, _shown(result.state.gap), mark, ms=6.5, mfc=filled, mec=ink, mew=1.2)
    _depth_axis(axes, depths)
    axes.set_ylim(SHOWN_FROM, top)
    axes.set_ylabel("unigram entropy minus held-out loss (nats)")
    axes.set_title("How much more than byte frequencies was learnt, by depth", loc="left", fontsize=12)
    _legend(axes, claim, main)
    first: Any = None
    for column, depth in enumerate(shown):
        first = _losses(figure.add_subplot(grid[1, column], sharey=first), claim, main, depth, column == 0) or first
    return figure


def _losses(axes: "Axes", claim: Claim, results: Sequence[Result], depth: int, leftmost: bool) -> "Axes":
    """The training losses of every arm at one depth, with the unigram entropy."""
    for result in results:
        if result.cell.depth != depth or result.record is None or "loss_train" not in result.record.series:
            continue
        series, arm = result.record.series["loss_train"], result.cell.arm
        style = "--" if _variant(claim, arm) else "-"
        axes.plot(series.steps, series.values, style, color=colour(claim, arm), lw=1.1, alpha=0.75)
        axes.axhline(result.record.start["data"]["unigram_nats"], color=GREY, lw=0.8)
    axes.set_ylim(1.8, 6.2)
    axes.set_title(f"{depth} blocks", fontsize=10)
    axes.set_xlabel("step")
    if leftmost:
        axes.set_ylabel("training loss (nats)")
    else:
        axes.tick_params(labelleft=False)
    return axes


def _update(claim: Claim, results: Sequence[Result]) -> "Figure | None":
    """The judged quantity over depth on log axes, one panel per optimizer, with the fitted slopes."""
    expected = [expectation for expectation in claim.expect if isinstance(expectation, Slope)]
    panels: dict[str, list[Slope]] = {}
    for expectation in expected:
        optimizer = str({**claim.base, **claim.arms[expectation.arm]}.get("train.optim.name", ""))
        panels.setdefault({"adamw": "Adam", "sgd": "SGD"}.get(optimizer, optimizer), []).append(expectation)
    if not any(result.value(e.quantity, e.step) for e in expected for result in results):
        return None
    figure = _new(11, 4.8)
    for column, (optimizer, slopes) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), column + 1)
        depths: set[int] = set()
        inks: set[str] = set()
        for expectation in slopes:
            own = values_of(expectation, results)
            # Over the learning rate: in the linear regime that is what arms with different rates have in common.
            rate = own[0][0].cell.lr if own else 1.0
            points = [(result.cell.depth, value / rate) for result, value in own if value is not None and value > 0]
            if not points:
                continue
            depths |= {depth for depth, _ in points}
            line, ink = fit(expectation, results), colour(claim, expectation.arm)
            dashes = "--" if ink in inks else "-"  # a variant of an arm of the same scheme
            inks.add(ink)
            label = claim.labels[expectation.arm].removesuffix(f" ({optimizer})")
            if line is not None:
                if line.slope.lo is not None and line.slope.hi is not None:
                    label += f": slope {line.slope.value:.2f} (95 % {line.slope.lo:.2f}..{line.slope.hi:.2f})"
                ends = np.array([min(depths), max(depths)], dtype=float)
                axes.plot(ends, [line.at(x) / rate for x in ends], dashes, color=ink, lw=1.8, label=label)
            x, y = zip(*points, strict=True)
            axes.plot(x, y, "o", ms=5.5, mfc="none", mec=ink, mew=1.3, label=None if line else label)
        if not depths:
            axes.set_axis_off()
            continue
        axes.set_yscale("log")
        _depth_axis(axes, sorted(depths))
        low, high = axes.get_ylim()
        axes.set_ylim(low / 1.3, high * (high / low) ** 0.3)  # room for the legend
        axes.set_title(f"{optimizer}, after {slopes[0].step} steps", loc="left", fontsize=12)
        if column == 0:
            axes.set_ylabel("model update per token / learning rate")
        axes.legend(frameon=False, fontsize=9, loc="upper left")
    return figure


def _new(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def _depth_axis(axes: "Axes", depths: Sequence[int]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(list(depths), [str(depth) for depth in depths])
    axes.minorticks_off()
    axes.set_xlabel("blocks")
    axes.grid(axis="both", alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: "Axes", claim: Claim, results: Sequence[Result]) -> None:
    """The arms, and below them what the marks mean."""
    from matplotlib.lines import Line2D

    handles = list(axes.get_legend_handles_labels()[0])
    labels = {result.state.label for result in results}
    for label, mark in MARKS.items():
        if label in labels:
            handles.append(Line2D([], [], color=GREY, marker=mark, ls="", ms=6, label=f"{label} (one seed)"))
    axes.legend(handles=handles, frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _variant(claim: Claim, arm: str) -> bool:
    """Returns whether an earlier arm has the same scheme; it is then drawn dashed."""
    arms = list(claim.arms)
    scheme = claim.arms[arm].get("model.scheme")
    return any(claim.arms[other].get("model.scheme") == scheme for other in arms[: arms.index(arm)])


def _mixed(axes: "Axes") -> Any:
    return axes.get_yaxis_transform()


def _shown(gap: float | None) -> float:
    """Returns where a gap is drawn: at the lower edge when it is not finite or far below."""
    return max(gap, SHOWN_FROM + 0.04) if gap is not None and gap == gap else SHOWN_FROM + 0.04


def _few(items: Sequence[int], n: int) -> list[int]:
    """Returns at most n items spread over all, the first and the last among them."""
    if len(items) <= n:
        return list(items)
    return [items[round(i * (len(items) - 1) / (n - 1))] for i in range(n)]
