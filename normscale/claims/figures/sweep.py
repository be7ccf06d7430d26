"""The held-out loss at the end over the learning rate, one line for each arm and depth."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from normscale.claims.claim import Claim
from normscale.claims.figures.common import DASHES, OTHERS, new, plain
from normscale.claims.judges.sweeps import kept_loss
from normscale.claims.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(claim: Claim, results: Sequence[Result]) -> "Figure | None":
    """Means over seeds as lines, seeds as dots; a run that broke off counts as at its beginning."""
    found: dict[tuple[str, int], dict[float, list[float]]] = {}
    seen = set()  # a control may be a run of the sweep
    for result in results:
        cell, loss = result.cell, kept_loss(result)
        one = (cell.arm, cell.depth, cell.lr, cell.seed)
        if loss is not None and one not in seen:
            seen.add(one)
            found.setdefault((cell.arm, cell.depth), {}).setdefault(cell.lr, []).append(loss)
    if not found:
        return None
    figure = new(8.5, 4.8)
    axes = figure.add_subplot()
    for place, ((arm, depth), by_rate) in enumerate(sorted(found.items())):
        ink, rates = OTHERS[place % len(OTHERS)], sorted(by_rate)
        means = [sum(by_rate[rate]) / len(by_rate[rate]) for rate in rates]
        label = f"{claim.labels[arm]}, {depth} blocks"
        axes.plot(rates, means, ls=DASHES[place % len(DASHES)], color=ink, lw=1.8, label=label)
        for rate in rates:
            axes.plot([rate] * len(by_rate[rate]), by_rate[rate], "o", ms=4, mfc="none", mec=ink)
    axes.set_xscale("log")
    axes.set_xlabel("peak learning rate")
    axes.set_ylabel("held-out loss at the end (nats), at most that at initialisation")
    axes.set_title("Loss by learning rate", loc="left", fontsize=12)
    plain(axes)
    axes.legend(frameon=False, fontsize=9)
    return figure
