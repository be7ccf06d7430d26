"""One figure of everything that a run recorded over depth: a panel for each profile, at the first and last steps."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from normscale.tracking.pictures import NON_FINITE, Picture, pixels
from normscale.tracking.reader import Profile, RunRecord
from normscale.tracking.record import PROFILES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 2
PANEL = (645, 400)  # pixels
FONT = 18  # pixels; the UI shows the figure at half its size
DECADE = 10.0  # a profile that spans more than this is drawn on a logarithmic axis
BAD = "nonfinite"  # counts that are drawn only where they are not all 0


def depth_figure(record: RunRecord) -> Picture:
    """Returns a picture with a panel for each profile: the first measured step, the middle one and the last finite.

    Depth is a share, 0 the first row and 1 the last. What is not finite stands as triangles at the upper edge.
    Shape: picture [height, width, 3].
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shown = {name: one for name, one in record.profiles.items() if one.data.size and not _is_dull(name, one)}
    rows = max(1, math.ceil(len(shown) / COLUMNS))
    size = (COLUMNS * PANEL[0] / 72, rows * PANEL[1] / 72)
    with mpl.rc_context({"font.size": FONT, "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=size, dpi=72)
        figure.subplots_adjust(**_margins(rows))  # the layout engines take seconds for so many panels
        for number, (name, one) in enumerate(shown.items(), start=1):
            _panel(figure.add_subplot(rows, COLUMNS, number), name, one)
        return pixels(figure)


def _margins(rows: int) -> dict[str, float]:
    """Returns the places of the panels so that titles of two lines and tick labels fit, in shares of the figure."""
    width, height = COLUMNS * PANEL[0], rows * PANEL[1]
    sides = {"left": 84 / width, "right": 1 - 16 / width, "bottom": 62 / height, "top": 1 - 58 / height}
    return {**sides, "wspace": 100 / (PANEL[0] - 100), "hspace": 124 / (PANEL[1] - 124)}


def _is_dull(name: str, one: Profile) -> bool:
    return name.endswith(BAD) and not np.nan_to_num(one.data).any()


def _panel(axes: "Axes", name: str, one: Profile) -> None:
    never = np.isnan(one.data).all(axis=0)  # rows that have no such number, as sublayers without attention
    shades = _shades(np.flatnonzero(np.isfinite(one.data[:, ~never]).all(axis=1)).tolist(), len(one.steps) - 1)
    values = one.data[list(shades)].astype(np.float64)
    finite = values[np.isfinite(values)]
    positive = finite.size > 0 and finite.min() > 0
    logs = bool(positive and finite.max() / finite.min() > DECADE)
    depth = np.linspace(0.0, 1.0, values.shape[1]) if values.shape[1] > 1 else np.array([0.5])
    if logs:
        axes.set_yscale("log")
    elif positive:
        axes.set_ylim(0.0, 1.1 * float(finite.max()))  # a flat profile should look flat
    for (index, shade), row in zip(shades.items(), values, strict=True):
        bad = "" if np.isfinite(row[~never]).all() else ", not finite"
        _line(axes, depth[~never], row[~never], shade, f"step {one.steps[index]}{bad}")
    axes.set_title(_wrapped(f"{name}: {PROFILES.get(name, '')}"), fontsize=FONT - 1, loc="left")
    axes.set_xlabel("layer / L", labelpad=2)
    axes.set_xlim(-0.02, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=FONT - 2, loc="best", framealpha=0.7, edgecolor="none", borderpad=0.2, labelspacing=0.2)


def _shades(whole: list[int], last: int) -> dict[int, str]:
    """Returns the records that are drawn and in which colour: of the finite ones the first, the middle one and the
    last, which is the darkest, and the very last where it is not finite."""
    ends = dict.fromkeys([whole[0], whole[len(whole) // 2], whole[-1]] if whole else [])
    shades = dict(zip(reversed(ends), ("#111111", "#777777", "#bbbbbb"), strict=False))
    return dict(sorted(shades.items())) | ({} if last in shades else {last: NON_FINITE})


def _line(axes: "Axes", depth: NDArray[np.float64], row: NDArray[np.float64], shade: str, label: str) -> None:
    good = np.isfinite(row)
    marks: dict[str, Any] = {"marker": "." if good.sum() <= 60 else ""}
    axes.plot(depth[good], row[good], color=shade, lw=1.8, label=label, **marks)
    if not good.all():
        top = np.full(int((~good).sum()), 0.98)
        axes.plot(depth[~good], top, "v", color=NON_FINITE, ms=7, transform=axes.get_xaxis_transform())


def _wrapped(text: str) -> str:
    import textwrap

    lines = textwrap.wrap(text.removesuffix(": "), 56)
    return "\n".join(lines[:2]) + ("..." if len(lines) > 2 else "")
