"""Recorded numbers over depth on log axes, with the fitted slopes; alone, or beside whether the models train."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from normscale.claims.claim import DECODER, Claim
from normscale.claims.expect import Larger, Numeric, Slope, SlopeWithin, Steeper
from normscale.claims.figures.common import (
    GREY,
    MARKS,
    SHOWN_FROM,
    colour,
    dashes,
    depth_axis,
    log_scale,
    mark_handles,
    new,
    plain,
    shown,
)
from normscale.claims.judges.slopes import fit, points_of, values_of, when_said
from normscale.claims.results import MAIN, Result
from normscale.claims.state import AT_UNIGRAM
from normscale.tracking.record import TRAINED_NATS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {"update": "Model update", "grad_last_out": "Gradient", "grad_first": "Gradient"}
PANEL_IN, ROW_IN, AROUND_IN = 4.6, 0.3, 1.2  # inches: height of a panel, of a row below it, what is around the rows
OPTIMIZERS = {"adamw": "Adam", "sgd": "SGD"}
AXES = {
    "update": "model update per token / learning rate",
    "grad_last_out": "gradient norm of the last feed-forward output matrix",
    "grad_first": "gradient norm of the first sublayer",
}

Panels = dict[str, list[Slope]]
"""{title: what it shows, one line each}"""


def draw(claim: Claim, results: Sequence[Result]) -> "Figure | None":
    """The judged quantity over depth, one panel for each optimizer and topology."""
    panels = _panels(claim, results)
    if not panels:
        return None
    figure = new(11 if len(panels) > 1 else 8.5, 4.8)
    for column, (title, lines) in enumerate(panels.items()):
        _panel(figure.add_subplot(1, len(panels), column + 1), claim, results, title, lines)
    return figure


def draw_mixed(claim: Claim, results: Sequence[Result]) -> "Figure | None":
    """As `draw`, and below it which arms train."""
    panels = _panels(claim, results)
    trained = [result for result in results if claim.asks_training(result.cell.arm) and result.state.gap is not None]
    rows = _rows(claim, trained)
    if not panels and not rows:
        return None
    heights = [PANEL_IN] if panels else []
    heights += [AROUND_IN + ROW_IN * len(rows)] if rows else []
    figure = new(11, sum(heights))
    # Each part has its own left edge: the long names of the rows must not narrow the panels.
    parts = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if panels:
        part = parts.pop(0)
        for column, (title, lines) in enumerate(panels.items()):
            _panel(part.add_subplot(1, len(panels), column + 1), claim, results, title, lines)
    if rows:
        _training(parts.pop(0).add_subplot(), claim, rows)
    return figure


def _panels(claim: Claim, results: Sequence[Result]) -> Panels:
    """Returns the panels that have something to show."""
    judged = [e for e in claim.expect if isinstance(e, Slope | SlopeWithin | Steeper | Larger)]
    if not judged:
        return {}
    first: Numeric = judged[0]
    lines = [Slope(arm, first.quantity, first.step, "above", 0.0) for arm in claim.arms if not claim.asks_training(arm)]
    lines = [line for line in lines if any(value is not None and value > 0 for _, value in values_of(line, results))]
    kinds = {line.arm: _kind(claim, line.arm) for line in lines}
    told = [len(set(kind)) > 1 for kind in zip(*kinds.values(), strict=True)]
    panels: Panels = {}
    for line in lines:
        words = [word for word, differs in zip(kinds[line.arm], told, strict=True) if differs]
        title = ", ".join([f"{TITLES[line.quantity]} {when_said(line.quantity, line.step)}", *words])
        panels.setdefault(title, []).append(line)
    return panels


def _kind(claim: Claim, arm: str) -> tuple[str, str]:
    """Returns optimizer and topology of an arm, in words."""
    name = str({**claim.base, **claim.arms[arm]}.get("train.optim.name", ""))
    keys = claim.depth_keys.get(arm, DECODER)
    known: dict[tuple[str, ...], str] = {DECODER: "decoder-only", ("model.N",): "encoder-only"}
    topology = known.get(keys, "encoder and decoder")
    return OPTIMIZERS.get(name, name), topology


def _panel(axes: "Axes", claim: Claim, results: Sequence[Result], title: str, lines: Sequence[Slope]) -> None:
    depths: set[int] = set()
    inks: list[str] = []
    for line in lines:
        own = values_of(line, results)
        # An update over the learning rate: in the linear regime arms with different rates have that in common.
        rate = own[0][0].cell.lr if own and line.quantity == "update" else 1.0
        points = [(result.cell.depth, value / rate) for result, value in own if value is not None and value > 0]
        if not points:
            continue
        depths |= {depth for depth, _ in points}
        fitted, ink = fit(points_of(line, results)), colour(claim, line.arm)
        style: Any = dashes(inks.count(ink))  # a variant of an arm of the same scheme
        inks.append(ink)
        label = claim.labels[line.arm]
        for optimizer in OPTIMIZERS.values():
            label = label.removesuffix(f" ({optimizer})")
        if fitted is not None:
            slope = fitted.slope
            if slope.lo is not None and slope.hi is not None:
                label += f": slope {slope.value:.2f} (95 % {slope.lo:.2f}..{slope.hi:.2f})"
            ends = np.array([min(d for d, _ in points), max(d for d, _ in points)], dtype=float)
            axes.plot(ends, [fitted.at(x) / rate for x in ends], ls=style, color=ink, lw=1.8, label=label)
        x, y = zip(*points, strict=True)
        axes.plot(x, y, "o", ms=5.5, mfc="none", mec=ink, mew=1.3, label=None if fitted else label)
    log_scale(axes)
    depth_axis(axes, sorted(depths))
    low, high = axes.get_ylim()
    room = 0.09 * len(lines) + 0.06
    axes.set_ylim(low / 1.3, high * (high / low) ** room)  # room for the legend
    axes.set_title(title, loc="left", fontsize=12)
    if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
        axes.set_ylabel(AXES[lines[0].quantity])
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _rows(claim: Claim, results: Sequence[Result]) -> list[tuple[str, str, list[Result]]]:
    """Returns (arm, label, runs) for each arm and depth that was trained, in the order of the claim."""
    rows = []
    for arm, label in claim.labels.items():
        own = [result for result in results if result.cell.arm == arm]
        for depth in sorted({result.cell.depth for result in own}):
            for role, said in ((MAIN, ""), (("low-lr",), ", lower rate"), (("long",), ", longer")):
                runs = [result for result in own if result.cell.depth == depth and result.cell.role in role]
                if runs:
                    rows.append((arm, f"{label}, {depth} blocks{said}", runs))
    return rows


def _training(axes: "Axes", claim: Claim, rows: Sequence[tuple[str, str, list[Result]]]) -> None:
    """One row for each arm and depth: where its runs ended, from stuck on the left to trained on the right."""
    everything = [result for _, _, runs in rows for result in runs]
    axes.axvspan(SHOWN_FROM, AT_UNIGRAM, color="#000000", alpha=0.06, lw=0)
    axes.axvline(0, color=GREY, lw=1)
    axes.axvline(TRAINED_NATS, color=GREY, lw=0.8, ls=":")
    for y, (arm, _, runs) in enumerate(rows):
        ink = colour(claim, arm)
        for result in runs:
            mark = MARKS.get(result.state.label, "o")
            axes.plot(shown(result.state.gap), y, mark, ms=6.5, mfc=ink, mec=ink, mew=1.2, alpha=0.8)
    axes.set_yticks(range(len(rows)), [label for _, label, _ in rows])
    axes.set_ylim(len(rows) - 0.1, -0.6)
    top = max(shown(result.state.gap) for result in everything)
    axes.set_xlim(SHOWN_FROM, max(0.5, 1.08 * top))
    plain(axes)
    axes.set_xlabel("unigram entropy minus held-out loss (nats)")
    axes.set_title("Which of them train", loc="left", fontsize=12)
    low: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "color": GREY, "fontsize": 9, "va": "bottom"}
    axes.text(SHOWN_FROM + 0.01, 0.01, "stuck or diverged", **low)
    axes.text(TRAINED_NATS + 0.01, 0.01, "trained from here on", **low)
    handles: list[Any] = mark_handles(everything)
    axes.legend(handles=handles, frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
