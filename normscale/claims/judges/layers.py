"""Arrays over the layers of one model: the judges of `Thirds` and `Along`.

Each run gives one number; the interval is over its seeds, and the whole of it has to lie on one side of the bar.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from normscale.claims.claim import Claim, Verdict
from normscale.claims.expect import Along, Layered, Thirds
from normscale.claims.fit import Estimate, mean, power_law
from normscale.claims.results import MAIN, Measured, Part, Result, spread

NOUNS = {
    "stream_rms": "RMS of the stream",
    "angle": "angle by which a block turns the stream",
    "removal": "loss increase without a block",
    "grad_norm": "gradient of a sublayer",
}
UNITS = {"stream_rms": "1", "angle": "half turns", "removal": "nats", "grad_norm": "1"}
WHEN = {"first": "at initialisation", "last": "after training"}


def describe(claim: Claim, expectation: Layered) -> str:
    """Returns the expectation as a sentence."""
    label, noun, depth = claim.labels[expectation.arm], NOUNS[expectation.profile], expectation.depth
    if isinstance(expectation, Along):
        along, when = "over the number of the sublayer", WHEN[expectation.when]
        bars = f"from {expectation.lo:g} to {expectation.hi:g}"
        return f"{label}, {depth} blocks: the log-log slope of the {noun} {along}, {when}, is {bars}"
    kind = "over" if expectation.compare == "ratio" else "minus"
    what = f"the {noun}, mean of the deep third {kind} that of the shallow third"
    return f"{label}, {depth} blocks: {what}, is {expectation.side} {expectation.bar:g} after training"


def judge_thirds(claim: Claim, expectation: Thirds, results: Sequence[Result]) -> Part:
    kind = "over" if expectation.compare == "ratio" else "minus"
    topic = f"deep third {kind} shallow third ({expectation.side} {expectation.bar:g} expected)"

    def decide(lo: float, hi: float) -> tuple[bool, bool]:
        above, below = lo > expectation.bar, hi < expectation.bar
        return (above, hi <= expectation.bar) if expectation.side == "above" else (below, lo >= expectation.bar)

    return _judged(claim, expectation, _values(expectation, results), decide, topic)


def judge_along(claim: Claim, expectation: Along, results: Sequence[Result]) -> Part:
    def decide(lo: float, hi: float) -> tuple[bool, bool]:
        within = expectation.lo <= lo and hi <= expectation.hi
        return within, hi < expectation.lo or lo > expectation.hi

    topic = f"slope over the sublayers {WHEN[expectation.when]} (expected {expectation.lo:g}..{expectation.hi:g})"
    return _judged(claim, expectation, _values(expectation, results), decide, topic)


def thirds(array: NDArray[np.float64]) -> tuple[float, float]:
    """Returns the means of the shallow and of the deep third; layers that were not measured (NaN) are left out.

    Shape: array [layers].
    """
    share = np.arange(len(array)) / max(1, len(array) - 1)
    shallow, deep = array[share <= 1 / 3], array[share >= 2 / 3]
    shallow, deep = shallow[~np.isnan(shallow)], deep[~np.isnan(deep)]
    return (float(shallow.mean()), float(deep.mean())) if len(shallow) and len(deep) else (math.nan, math.nan)


def compared(array: NDArray[np.float64], compare: str) -> float:
    """Returns the deep third over, or minus, the shallow third; NaN where there is nothing to compare."""
    shallow, deep = thirds(array)
    if compare == "difference":
        return deep - shallow
    return deep / shallow if shallow > 0 else math.nan


def slope(array: NDArray[np.float64]) -> float:
    """Returns the log-log slope over the layers, numbered from 1; NaN where it has none."""
    line = power_law([float(n) for n in range(1, len(array) + 1)], array.tolist())
    return math.nan if line is None else line.slope.value


def measure(claim: Claim, results: Sequence[Result]) -> list[Measured]:
    """Returns the numbers of the layered expectations, for every arm that has them."""
    numbers: dict[str, Measured] = {}
    for expectation in claim.expect:
        if not isinstance(expectation, Thirds | Along):
            continue
        noun = NOUNS[expectation.profile]
        groups: dict[tuple[str, int], list[float]] = {}
        for result in results:
            number = _number(expectation, result)
            if number is not None and result.cell.role in MAIN:
                groups.setdefault((result.cell.arm, result.cell.depth), []).append(number)
        for (arm, depth), found in groups.items():
            if not all(math.isfinite(number) for number in found):
                continue
            where = f"{claim.labels[arm]}, {depth} blocks"
            if isinstance(expectation, Along):
                name = f"{arm} L{depth} {expectation.profile} slope {expectation.when}"
                said = f"{where}: slope of the {noun} over the sublayers, {WHEN[expectation.when]}"
                unit = "log/log"
            else:
                kind = "over" if expectation.compare == "ratio" else "minus"
                name = f"{arm} L{depth} {expectation.profile} deep {kind} shallow"
                said = f"{where}: {noun}, deep third {kind} shallow third"
                unit = "1" if expectation.compare == "ratio" else UNITS[expectation.profile]
            numbers[name] = Measured.of(name, said, mean(found), unit)
    return list(numbers.values())


def _number(expectation: Layered, result: Result) -> float | None:
    """Returns the run's number, or None where it is missing or did not record the array.

    NaN where the run broke off: what it last recorded is not what it is after training.
    """
    when = expectation.when if isinstance(expectation, Along) else "last"
    array = result.layers(expectation.profile, when)
    if result.broke_off and (array is None or when == "last"):
        return math.nan
    if array is None:
        return None
    return slope(array) if isinstance(expectation, Along) else compared(array, expectation.compare)


def _values(expectation: Layered, results: Sequence[Result]) -> list[float | None]:
    at = (expectation.arm, expectation.depth)
    own = [result for result in results if (result.cell.arm, result.cell.depth) == at and result.cell.role in MAIN]
    return [_number(expectation, result) for result in own]


def _judged(
    claim: Claim,
    expectation: Layered,
    values: Sequence[float | None],
    decide: Callable[[float, float], tuple[bool, bool]],
    topic: str,
) -> Part:
    says, noun = describe(claim, expectation), NOUNS[expectation.profile]
    label = f"{claim.labels[expectation.arm]}, {noun}"
    known = [value for value in values if value is not None]
    if not known:
        return Part(says, "not run", f"{label}: not recorded", "no such run in this profile has recorded it")
    counted = f"{len(known)} of {len(values)} runs"
    if not all(math.isfinite(value) for value in known):
        return Part(says, "inconclusive", f"{label}: not finite somewhere, or nothing to compare", counted)
    estimate: Estimate = mean(known)
    digits = 3 if abs(estimate.value) < 0.1 else 2
    brief = f"{noun} {estimate.value:.{digits}f}"
    detail = f"{estimate.value:.{digits}f} ({spread(estimate, digits) or 'one run'}), {counted}"
    if len(known) < len(values):
        return Part(says, "inconclusive", brief, f"{detail}: a missing run is no measurement", topic)
    if estimate.lo is None or estimate.hi is None:
        return Part(says, "inconclusive", f"{brief} (one seed has no interval)", detail, topic)
    right, wrong = decide(estimate.lo, estimate.hi)
    verdict: Verdict = "supported" if right else "refuted" if wrong else "inconclusive"
    if verdict == "inconclusive":
        brief = f"{brief} ({spread(estimate, digits)})"
    return Part(says, verdict, brief, detail, topic)
