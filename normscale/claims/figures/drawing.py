"""Draws a claim's figure of the kind that it asks for."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from normscale.claims.claim import Claim, FigureName
from normscale.claims.figures import gap, growth, slopes, sweep, values
from normscale.claims.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(claim: Claim, results: Sequence[Result], path: Path) -> bool:
    """Draws the claim's figure as a PNG; returns False, and draws nothing, where no run has a number to show."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kinds: dict[FigureName, Callable[[Claim, Sequence[Result]], Figure | None]] = {
        "gap": gap.draw,
        "slopes": slopes.draw,
        "mixed": slopes.draw_mixed,
        "growth": growth.draw,
        "values": values.draw,
        "sweep": sweep.draw,
    }
    figure = kinds[claim.figure](claim, [result for result in results if result.record is not None])
    if figure is None:
        return False
    FigureCanvasAgg(figure).print_png(path)
    return True
