"""Pictures of arrays over depth: a layer x step heat map and a profile at one step, made to be read as thumbnails.

Depth is a share (0 the first sublayer, 1 the last) and the colour range is given from outside, so that pictures of
different arms and depths compare. What is not finite is magenta. No titles: the page that shows a picture names it.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Picture = NDArray[np.uint8]
Limits = tuple[float, float]

WIDTH, HEIGHT, FONT = 900, 600, 24  # pixels; smaller letters are lost in a 256-pixel thumbnail
NON_FINITE = "#ff00ff"
_COLUMNS, _ROWS = 240, 160  # cells of a heat map: more than a thumbnail can show


def limits(arrays: Sequence[NDArray[np.float32]]) -> Limits:
    """Returns a range of whole decades that holds nearly all positive finite values of all arrays."""
    logs = [_log10(array) for array in arrays]
    finite = [values[np.isfinite(values)] for values in logs]
    together = np.concatenate(finite) if finite else np.empty(0)
    if together.size == 0:
        return 1e-1, 1e1
    low, high = np.percentile(together, [0.5, 99.5])
    bottom, top = math.floor(float(low) + 1e-6), math.ceil(float(high) - 1e-6)
    if top - bottom < 2:  # a flat profile should look flat
        bottom = round(float(low + high) / 2) - 1
        top = bottom + 2
    return 10.0**bottom, 10.0**top


def heat(
    steps: Sequence[int],
    data: NDArray[np.float32],
    label: str,
    span: Limits,
    marks: Sequence[tuple[int, int | None]] = (),
) -> Picture:
    """Returns a picture of `data` [steps, rows] with steps to the right and depth upwards, colours logarithmic.

    `marks` are (step, row) of values that went bad, shown as crosses, at the upper edge where the row is not known:
    they may lie between records.

    Shape: data [len(steps), rows]; picture [HEIGHT, WIDTH, 3].
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FixedLocator, MaxNLocator

    colours = colormaps["viridis"].with_extremes(bad=NON_FINITE)
    first, last = _ends(steps)
    bottom, top = math.log10(span[0]), math.log10(span[1])
    field = (_grid(steps, data, first, last) - bottom) / (top - bottom)
    with _drawing() as (figure, axes):
        picture = colours(np.clip(field, 0.0, 1.0))
        axes.imshow(picture, origin="lower", aspect="auto", extent=(first, last, 0.0, 1.0), interpolation="nearest")
        rows = data.shape[1]
        dot: dict[str, Any] = {"color": NON_FINITE, "markersize": 20, "markeredgecolor": "white"}
        for step, row in marks:
            height = 1.0 if row is None or row >= rows else (row + 0.5) / rows
            axes.plot([step], [height], "X", clip_on=False, zorder=5, **dot)
        axes.set_xlim(first, max([last, *(step for step, _ in marks)]))
        axes.set_xlabel("step")
        axes.set_ylabel("layer / L")
        axes.set_yticks([0.0, 0.5, 1.0])
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True) if len(steps) > 1 else FixedLocator([steps[0]]))
        bar = figure.colorbar(ScalarMappable(LogNorm(*span), colours), ax=axes, pad=0.03)
        bar.set_label(label)
        _decades(bar.ax.yaxis, span)
        return pixels(figure)


def profile(
    data: NDArray[np.float32],
    label: str,
    span: Limits | None,
    step: int,
    bad_row: int | None = None,
    before: tuple[int, NDArray[np.float32]] | None = None,
    bad_name: str = "",
) -> Picture:
    """Returns a picture of one array over depth, on a logarithmic axis of fixed range.

    With `span` None the range is that of the data, from 0 where they span less than a decade. Values that are not
    finite stand as magenta marks on the upper edge; `bad_row` is marked by a line with `bad_name`, and `before`, an
    earlier step and its array, is drawn in grey.
    Shape: data [rows]; picture [HEIGHT, WIDTH, 3].
    """
    values = np.asarray(data, dtype=np.float64)
    depth = np.linspace(0.0, 1.0, values.size) if values.size > 1 else np.array([0.5] * values.size)
    good = np.isfinite(values)
    span, logs = _own_span([values, *([before[1]] if before is not None else [])]) if span is None else (span, True)
    with _drawing() as (figure, axes):
        marker = "o" if values.size <= 60 else ""
        if before is not None:
            axes.plot(depth, _inside(before[1], span), color="#999999", linewidth=3, linestyle="--")
            axes.text(0.97, 0.84, f"step {before[0]}", ha="right", va="top", color="#888888", transform=axes.transAxes)
        axes.plot(depth, _inside(values, span), color="#333333", linewidth=3, marker=marker, markersize=7)
        axes.plot(depth[~good], np.full((~good).sum(), span[1]), "v", color=NON_FINITE, markersize=16, clip_on=False)
        if bad_row is not None and 0 <= bad_row < values.size:
            axes.axvline(depth[bad_row], color=NON_FINITE, linewidth=4, alpha=0.6)
            side, gap = ("left", 0.015) if depth[bad_row] < 0.5 else ("right", -0.015)
            axes.text(
                depth[bad_row] + gap, 0.04, bad_name, ha=side, color="#b000b0", transform=axes.get_xaxis_transform()
            )
        if logs:
            axes.set_yscale("log")
        axes.set_ylim(*span)
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("layer / L")
        axes.set_ylabel(label)
        if logs:
            _decades(axes.yaxis, span)
        axes.grid(alpha=0.3)
        axes.text(0.97, 0.94, f"step {step}", ha="right", va="top", transform=axes.transAxes)
        return pixels(figure)


def _own_span(arrays: Sequence[NDArray[Any]]) -> tuple[Limits, bool]:
    """Returns the range of some arrays, and whether it is logarithmic, to whole decades; else it begins at 0."""
    joined = np.concatenate([np.asarray(array, dtype=np.float64) for array in arrays])
    positive = joined[np.isfinite(joined) & (joined > 0)]
    if positive.size == 0:
        return (0.0, 1.0), False
    low, high = float(positive.min()), float(positive.max())
    if high < 10 * low:
        return (0.0, 1.25 * high), False
    bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return (10.0**bottom, 10.0 ** (top + (top == bottom))), True


def _inside(data: NDArray[Any], span: Limits) -> NDArray[np.float64]:
    """Returns the values that can be drawn on a logarithmic axis, moved to its ends where they are beyond; else NaN."""
    values = np.asarray(data, dtype=np.float64)
    good = np.isfinite(values)
    return np.where(good & (values > 0), np.clip(values, *span), np.where(good, span[0], np.nan))


def _log10(array: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns log10 with -inf where the value is not positive and NaN where it is not finite."""
    values = np.asarray(array, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log10(np.maximum(values, 0.0))
    return np.where(np.isfinite(values), logs, np.nan)


def _ends(steps: Sequence[int]) -> tuple[float, float]:
    """Returns the ends of the step axis: the last record has a width, too, since a run that crashed did so there."""
    first, last = float(steps[0]), float(steps[-1])
    if last == first:
        return first - 0.5, first + 0.5
    width = float(np.median(np.diff(np.asarray(steps, dtype=np.float64))))
    return first, last + min(max(width, 0.02 * (last - first)), 0.1 * (last - first))


def _grid(steps: Sequence[int], data: NDArray[np.float32], first: float, last: float) -> NDArray[np.float64]:
    """Returns log10 of the data on a regular grid [rows up, columns]; a cell that holds a NaN anywhere is NaN.

    Steps may be uneven: a column shows the newest record at or before its place. Rows are averaged when there are
    more than the picture can show, so that no layer is left out.
    """
    logs = _log10(data)
    lowest = logs[np.isfinite(logs)].min() if np.isfinite(logs).any() else 0.0
    logs = np.where(np.isneginf(logs), min(lowest, 0.0) - 30.0, logs)  # zero: far below any range, yet averageable
    edges = np.linspace(first, last, _COLUMNS + 1)
    begins = np.searchsorted(np.asarray(steps, dtype=np.float64), edges[:-1], side="right") - 1
    ends = np.searchsorted(np.asarray(steps, dtype=np.float64), edges[1:], side="left")
    begins = np.clip(begins, 0, len(steps) - 1)
    ends = np.clip(np.maximum(ends, begins + 1), 1, len(steps))
    columns = np.stack([logs[begin:end].mean(axis=0) for begin, end in zip(begins, ends, strict=True)], axis=1)
    rows = columns.shape[0]
    if rows <= _ROWS:
        return columns
    cuts = np.linspace(0, rows, _ROWS + 1).astype(int)
    return np.stack([columns[low:high].mean(axis=0) for low, high in pairwise(cuts)])


@contextmanager
def _drawing() -> "Iterator[tuple[Figure, Axes]]":
    """Gives a figure whose letters, all of them, are FONT pixels high."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": FONT, "font.family": "DejaVu Sans", "axes.linewidth": 2.0}):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, layout="constrained")  # 72 dpi: a point is a pixel
        yield figure, figure.add_subplot()


def _decades(axis: "Axis", span: Limits) -> None:
    """Puts at most six ticks on whole decades."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    bottom, top = round(math.log10(span[0])), round(math.log10(span[1]))
    stride = max(1, math.ceil((top - bottom) / 5))
    powers = list(range(bottom, top + 1, stride))
    axis.set_major_locator(FixedLocator([10.0**power for power in powers]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FixedFormatter([f"$10^{{{power}}}$" for power in powers]))


def pixels(figure: "Figure") -> Picture:
    """Returns what a figure looks like.

    Shape: result [height, width, 3].
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()
