"""The largest learning rates that schemes tolerate, by the records of claims: from sweeps, and from rising rates."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from normscale.claims.derived import RATE_TOLERATED
from normscale.claims.schemes.records import Ran, places_of

if TYPE_CHECKING:
    from normscale.claims.report import Reported


@dataclass(frozen=True)
class Tolerated:
    """The largest rate of a claim's sweep up to which every seed trained, at every rate; None: not even the least."""

    claim: str
    label: str
    depth: int
    rate: float | None
    swept: tuple[float, ...]


@dataclass(frozen=True)
class Risen:
    """Up to which rates the runs of a cell stood while the rate rose to `top`: least and largest; 0: nothing learnt."""

    claim: str
    label: str
    depth: int
    low: float
    high: float
    seeds: int
    top: float

    @property
    def to_the_end(self) -> bool:
        """Whether a run stood at the end of its ramp: it tolerates more than was tried."""
        return math.isclose(self.high, self.top, rel_tol=1e-6)

    @property
    def said(self) -> str:
        """Returns e.g. "0.0015 to 0.002"."""
        if self.high == 0.0:
            return "none: nothing was learnt while it rose"
        range_ = f"{self.low:.3g}" if self.low == self.high else f"{self.low:.3g} to {self.high:.3g}"
        return f"{range_} or more" if self.to_the_end else range_


def tolerated(runs: Sequence[Ran], scheme: str) -> list[Tolerated]:
    """Returns the largest tolerable learning rates of a scheme, one for every swept cell."""
    swept = [ran for ran in runs if ran.place.scheme == scheme and ran.cell.role == "sweep"]
    found = []
    for claim, label, depth in dict.fromkeys((ran.claim, ran.label, ran.cell.depth) for ran in swept):
        own = [ran for ran in swept if (ran.claim, ran.label, ran.cell.depth) == (claim, label, depth)]
        rates = sorted({ran.cell.lr for ran in own})
        failing = [ran.cell.lr for ran in own if ran.state != "trained"]
        held = [rate for rate in rates if rate < min(failing, default=math.inf)]
        found.append(Tolerated(claim, label, depth, max(held, default=None), tuple(rates)))
    return found


def risen(reported: Iterable["Reported"], scheme: str) -> list[Risen]:
    """Returns the rates that a scheme tolerated of one that rises, by claim, arm and depth.

    Arms that vary more than the scheme belong to their claim alone, as everywhere on the page.
    """
    found = []
    for one in reported:
        if one.profile is None or one.profile == "smoke" or RATE_TOLERATED not in one.claim.numbers:
            continue
        places, rates = places_of(one.claim, one.profile), dict[tuple[str, int, float], list[float]]()
        for result in one.results:
            place, rate = places.get(result.cell), result.number(RATE_TOLERATED)
            if place is not None and place.scheme == scheme and rate is not None:
                rates.setdefault((result.cell.arm, result.cell.depth, result.cell.lr), []).append(rate)
        for (arm, depth, top), own in sorted(rates.items(), key=lambda item: item[0][1:]):
            found.append(Risen(one.claim.id, one.claim.labels[arm], depth, min(own), max(own), len(own), top))
    return found
