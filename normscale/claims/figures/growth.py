"""What each layer of a model does, from the first to the last."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from normscale.claims.claim import Claim
from normscale.claims.figures.common import GREY, colour, dashes, log_scale, new, plain, variant
from normscale.claims.results import MAIN, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {
    "stream_rms": ("How large the stream is", "RMS of the residual stream after a sublayer"),
    "angle": ("How far a block turns it", "angle between a block's input and output (1 = half turn)"),
    "removal": ("What a block is worth", "increase of the held-out loss without the block (nats)"),
    "grad_norm": ("How large its gradient is", "gradient norm of a sublayer's parameters"),
}
FROM_START = ("stream_rms", "grad_norm")  # shown at initialisation, too, on a logarithmic scale
LINEAR_TO = 0.01  # nats: smaller increases are drawn on a linear scale, since they may be negative


def draw(claim: Claim, results: Sequence[Result]) -> "Figure | None":
    """Stream, angle and removal over relative depth, one line for each arm and depth, its seeds as a band."""
    main = [result for result in results if result.cell.role in MAIN]
    groups: dict[tuple[str, int], list[Result]] = {}
    for arm in claim.arms:
        for result in sorted(main, key=lambda result: result.cell.depth):
            if result.cell.arm == arm:
                groups.setdefault((arm, result.cell.depth), []).append(result)
    panels = [name for name in PANELS if name in claim.profiles_judged]
    if not any(result.layers(name) is not None for result in main for name in panels):
        return None
    figure = new(12.5 if len(panels) > 1 else 8.0, 5.0)
    handles: dict[str, Any] = {}
    for column, name in enumerate(panels):
        title, what = PANELS[name]
        axes = figure.add_subplot(1, len(panels), column + 1)
        axes.axvspan(0, 1 / 3, color="#000000", alpha=0.04, lw=0)
        axes.axvspan(2 / 3, 1, color="#000000", alpha=0.04, lw=0)
        for arm, depth in groups:
            label = f"{claim.labels[arm]}, {depth} blocks"
            lines = _lines(axes, claim, arm, groups[arm, depth], name)
            if lines:
                handles.setdefault(label, lines[0])
        axes.set_title(title, loc="left", fontsize=12)
        axes.set_ylabel(what)
        axes.set_xlabel("layer, from first (0) to last (1)")
        axes.set_xlim(0, 1)
        plain(axes)
        if name in FROM_START:
            log_scale(axes)
            axes.plot([], [], ":", color=GREY, lw=1.2, label="at initialisation")
            axes.plot([], [], "-", color=GREY, lw=1.8, label="after training")
            axes.legend(frameon=False, fontsize=9, loc="upper left")
        if name == "removal":
            axes.set_yscale("symlog", linthresh=LINEAR_TO)
            axes.axhline(0, color=GREY, lw=1)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=3, frameon=False, fontsize=10
    )
    return figure


def _lines(axes: "Axes", claim: Claim, arm: str, runs: Sequence[Result], name: str) -> list[Any]:
    """Draws the mean over seeds and the seeds' range as a band; for the stream its start as well, dotted."""
    ink, own = colour(claim, arm), dashes(variant(claim, arm))
    drawn: list[Any] = []
    for when, style in (("last", own), ("first", ":")):
        if when == "first" and name not in FROM_START:
            continue
        arrays = [array for run in runs if (array := run.layers(name, when)) is not None]
        if not arrays:
            continue
        x, table = _measured(np.stack(arrays))
        few = "o" if name == "removal" else ""  # some of the blocks alone
        width = 1.8 if when == "last" else 1.2
        drawn += axes.plot(x, table.mean(axis=0), ls=style, marker=few, ms=3.5, color=ink, lw=width)
        axes.fill_between(x, table.min(axis=0), table.max(axis=0), color=ink, alpha=0.15, lw=0)
    return drawn


def _measured(table: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the relative places of the layers that every seed measured, and their columns.

    Shape: table [seeds, layers].
    """
    x = np.arange(table.shape[1]) / max(1, table.shape[1] - 1)
    there = np.isfinite(table).all(axis=0)
    return x[there], table[:, there]
