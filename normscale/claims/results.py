"""The runs of a claim as its judges see them, and what judges say: numbers, parts, findings.

Everything here is a pure function of records.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from normscale.claims.claim import Cell, Role, Verdict
from normscale.claims.derived import DERIVED
from normscale.claims.expect import When
from normscale.claims.fit import Estimate
from normscale.claims.state import State, state_of
from normscale.tracking.reader import RunRecord, Series
from normscale.tracking.record import USER

WORST_FIRST: tuple[Verdict, ...] = ("refuted", "inconclusive", "not run", "supported")
MAIN: tuple[Role, ...] = ("main", "control")
WORST = {"gap": -math.inf, "bleu": 0.0}
"""What a training that broke off has come to: divergence is a measurement."""

ROLES = {"low-lr": ", 3x lower learning rate over 3x the steps", "long": ", 5x more steps"}


@dataclass(frozen=True)
class Result:
    """A cell and what its run left; None where there is nothing."""

    cell: Cell
    record: RunRecord | None

    @cached_property
    def state(self) -> State:
        return state_of(self.record)

    @property
    def broke_off(self) -> bool:
        """Whether the run stopped at a number that is not finite."""
        return self.record is not None and (self.record.end or {}).get("outcome") == "nan"

    def value(self, quantity: str, step: int) -> float | None:
        """Returns a recorded scalar at a step, or None where the run did not record it or did not finish.

        A run that stopped before it could, at a number that is not finite, is no missing one: its scalar is NaN.
        """
        if self.record is None or not self.record.finished:
            return None
        series = self.record.series.get(quantity, Series())
        if step in series.steps:
            return series.values[series.steps.index(step)]
        return math.nan if self.broke_off and self.record.summary.get("bad_step", -1) <= step else None

    def number(self, name: str, when: When = "last") -> float | None:
        """Returns a number of a finished run: one of a measurement, a recorded scalar, or one of the run's summary.

        Or one that follows from its records (`DERIVED`), as far as they go where it broke off.
        None where the run has none. Where a training broke off its last record is not that of its end: NaN, or the
        worst there is (`WORST`) of a number that says how good it has become.
        """
        if self.record is None or not self.record.finished:
            return None
        series = self.record.series.get(USER + name) or self.record.series.get(name)
        if series is None and name in DERIVED:
            return DERIVED[name](self.record)
        if self.broke_off and (series is None or when != "first"):
            return WORST.get(name, math.nan) if when == "last" else math.nan
        if series is None or not series.values:
            found = self.record.summary.get(name)
            return float(found) if isinstance(found, int | float) else None
        first, last = series.values[0], series.values[-1]
        if when == "growth":
            return last / first if first else math.nan
        return {"first": first, "last": last, "max": float(np.max(series.values)), "drift": abs(last - first)}[when]

    def layers(self, profile: str, when: str = "last") -> NDArray[np.float64] | None:
        """Returns an array over layers as it was first or last recorded, or None as for `value`.

        Of a model with an encoder and a decoder it is the decoder's: what goes up and down is in one stack.

        Shape: result [layers].
        """
        if self.record is None or not self.record.finished or profile not in self.record.profiles:
            return None
        array: NDArray[np.float64] = self.record.profiles[profile].data[0 if when == "first" else -1].astype(np.float64)
        model = self.record.start.get("config", {}).get("model", {})
        N, M = model.get("N", 0), model.get("M", 0)
        encoder = {N + M: N, 2 * N + 3 * M: 2 * N}.get(len(array), 0) if M else 0  # by blocks, or by sublayers
        return array[encoder:]


@dataclass(frozen=True)
class Measured:
    """A number of the claim with its 95 % interval: `name` for programs, `label` for readers."""

    name: str
    label: str
    value: float | None
    lo: float | None
    hi: float | None
    unit: str

    @classmethod
    def of(cls, name: str, label: str, estimate: Estimate, unit: str) -> "Measured":
        return cls(name, label, estimate.value, estimate.lo, estimate.hi, unit)


@dataclass(frozen=True)
class Part:
    """One expectation judged: `brief` is its share of the headline, `detail` says what it rests on.

    A `topic` is what several briefs are about; the headline names it once.
    """

    expect: str
    verdict: Verdict
    brief: str
    detail: str
    topic: str = ""


@dataclass(frozen=True)
class Finding:
    """What some of the runs of an expectation say: a verdict, the line that says it, what became of them."""

    verdict: Verdict
    brief: str = ""
    detail: str = ""


def worst(findings: Sequence[Finding]) -> Finding:
    """Returns the first of the findings with the worst verdict."""
    return min(findings, key=lambda finding: WORST_FIRST.index(finding.verdict))


def by_depth(
    results: Sequence[Result],
    arm: str,
    at: tuple[int, ...],
    at_least: int | None,
    roles: tuple[Role, ...] = MAIN,
) -> dict[int, list[Result]]:
    """Returns the runs of an arm by depth, from shallow to deep."""
    found: dict[int, list[Result]] = {}
    for result in sorted(results, key=lambda result: (result.cell.depth, result.cell.seed)):
        cell = result.cell
        wanted = cell.depth in at or (at_least is not None and cell.depth >= at_least)
        if cell.arm == arm and cell.role in roles and wanted:
            found.setdefault(cell.depth, []).append(result)
    return found


def listed(items: Iterable[object]) -> str:
    """Returns e.g. "6, 12 and 24"."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def spread(estimate: Estimate, digits: int = 2) -> str:
    """Returns e.g. "95 % 0.14..0.36"; nothing where there is no interval."""
    if estimate.lo is None or estimate.hi is None:
        return ""
    return f"95 % {estimate.lo:.{digits}f}..{estimate.hi:.{digits}f}"
