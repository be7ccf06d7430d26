"""Recorded numbers over depth: the judges of `Slope`, `SlopeWithin`, `Steeper` and `Larger`.

An expectation is supported or refuted when the whole 95 % interval lies on one side of its bars, else inconclusive.
"""

import math
from collections.abc import Sequence

from normscale.claims.claim import Claim, Verdict
from normscale.claims.expect import Larger, Numeric, Slope, SlopeWithin, Steeper
from normscale.claims.fit import Estimate, Line, power_law, ratio
from normscale.claims.results import MAIN, Measured, Part, Result, spread

NOUNS = {
    "update": "update",
    "grad_last_out": "gradient of the last feed-forward output matrix",
    "grad_first": "gradient of the first sublayer",
}
"""What a reader calls a quantity."""

Points = Sequence[tuple[int, float | None]]
"""(depth, value), one for each run or pair of runs; None where one is missing, NaN where one diverged."""


def describe(claim: Claim, expectation: Numeric) -> str:
    """Returns the expectation as a sentence."""
    label = claim.labels[expectation.arm]
    noun, when = NOUNS[expectation.quantity], when_said(expectation.quantity, expectation.step)
    slope = f"the log-log slope of the {noun} over depth, {when}, is"
    match expectation:
        case Slope():
            return f"{label}: {slope} {expectation.side} {expectation.bar:g}"
        case SlopeWithin():
            return f"{label}: {slope} from {expectation.lo:g} to {expectation.hi:g}"
        case Steeper():
            other = f"that of {claim.labels[expectation.than]} by over {expectation.by:g}"
            return f"{label}: {slope} {expectation.side} than {other}"
        case Larger():
            other, by = claim.labels[expectation.than], expectation.by
            times = f"over {by:g} times that" if by != 1 else "larger than that"
            return f"{label}: the {noun} {when} is {times} of {other}, as a geometric mean over depths"


def judge_slope(claim: Claim, expectation: Slope, results: Sequence[Result]) -> Part:
    points = points_of(expectation, results)
    estimate = _estimated(claim, expectation, points)
    topic = f"slope of the {NOUNS[expectation.quantity]} over depth (bar {expectation.bar:g})"
    if isinstance(estimate, Part):
        return estimate
    lo, hi = _ends(estimate)
    above, not_above = lo > expectation.bar, hi <= expectation.bar
    right, wrong = (above, not_above) if expectation.side == "above" else (not_above, above)
    return _decided(claim, expectation, estimate, points, right, wrong, topic)


def judge_slope_within(claim: Claim, expectation: SlopeWithin, results: Sequence[Result]) -> Part:
    points = points_of(expectation, results)
    estimate = _estimated(claim, expectation, points)
    topic = f"slope of the {NOUNS[expectation.quantity]} over depth"
    if isinstance(estimate, Part):
        return estimate
    lo, hi = _ends(estimate)
    within = expectation.lo <= lo and hi <= expectation.hi
    outside = hi < expectation.lo or lo > expectation.hi
    bars = f"expected {expectation.lo:g}..{expectation.hi:g}"
    return _decided(claim, expectation, estimate, points, within, outside, topic, bars)


def judge_steeper(claim: Claim, expectation: Steeper, results: Sequence[Result]) -> Part:
    """The slope of the ratio of the two arms, pair by pair, is the difference of their slopes.

    What the runs of a pair share (seed, data, what a depth deviates from a power law) then cancels.
    """
    points = pairs_of(expectation, results)
    estimate = _estimated(claim, expectation, points)
    than = claim.labels[expectation.than]
    topic = f"slope of the {NOUNS[expectation.quantity]} over depth, minus that of {than} (bar {expectation.by:g})"
    if isinstance(estimate, Part):
        return estimate
    lo, hi = _ends(estimate)
    more, not_more = lo > expectation.by, hi <= expectation.by
    right, wrong = (more, not_more) if expectation.side == "more" else (not_more, more)
    return _decided(claim, expectation, estimate, points, right, wrong, topic)


def judge_larger(claim: Claim, expectation: Larger, results: Sequence[Result]) -> Part:
    points = pairs_of(expectation, results)
    estimate = _estimated(claim, expectation, points)
    topic = f"{NOUNS[expectation.quantity]} over that of {claim.labels[expectation.than]} (bar {expectation.by:g})"
    if isinstance(estimate, Part):
        return estimate
    lo, hi = _ends(estimate)
    right, wrong = lo > expectation.by, hi <= expectation.by
    return _decided(claim, expectation, estimate, points, right, wrong, topic)


def measure(claim: Claim, results: Sequence[Result]) -> list[Measured]:
    """Returns the slopes of all arms that are measured over depth, then what compares arms."""
    numbers: list[Measured] = []
    for quantity in claim.quantities:
        noun = NOUNS[quantity]
        steps = recorded_steps(quantity, results)
        for arm, label in claim.labels.items():
            for step in steps if not claim.asks_training(arm) else ():
                line = fit(points_of(Slope(arm, quantity, step, "above", 0.0), results))
                if line:
                    said = f"{label}, slope of the {noun} over depth {when_said(quantity, step)}"
                    numbers.append(Measured.of(f"{arm} slope at step {step}", said, line.slope, "log/log"))
    for expectation in claim.expect:
        if not isinstance(expectation, Steeper | Larger):
            continue
        arm, than, quantity, step = expectation.arm, expectation.than, expectation.quantity, expectation.step
        one, other, noun = claim.labels[arm], claim.labels[than], NOUNS[quantity]
        points, when = pairs_of(expectation, results), when_said(quantity, step)
        if isinstance(expectation, Larger):
            if (estimate := ratio_of(points)) is not None:
                said = f"{one}, {noun} {when} over that of {other}"
                numbers.append(Measured.of(f"{arm} over {than} at step {step}", said, estimate, "1"))
        elif (line := fit(points)) is not None:
            said = f"{one}, slope of the {noun} {when} minus that of {other}"
            numbers.append(Measured.of(f"{arm} minus {than} slope at step {step}", said, line.slope, "log/log"))
    return list({number.name: number for number in numbers}.values())


def when_said(quantity: str, step: int) -> str:
    """Returns when a number was taken: an update after so many steps, all else at one."""
    if quantity == "update":
        return "after 1 step" if step == 1 else f"after {step} steps"
    return "at initialisation" if step == 1 else f"at step {step}"


def values_of(expectation: Slope | SlopeWithin, results: Sequence[Result]) -> list[tuple[Result, float | None]]:
    """Returns the runs of a slope and what each recorded; runs at another learning rate or length are left out."""
    own = [result for result in results if result.cell.arm == expectation.arm and result.cell.role in MAIN]
    return [(result, result.value(expectation.quantity, expectation.step)) for result in own]


def points_of(expectation: Slope | SlopeWithin, results: Sequence[Result]) -> Points:
    return [(result.cell.depth, value) for result, value in values_of(expectation, results)]


def pairs_of(expectation: Steeper | Larger, results: Sequence[Result]) -> Points:
    """Returns, for every depth and seed that either arm has, the arm's number over the other's.

    An update is taken per learning rate: in the linear regime that is what arms with different rates have in common.
    """
    found: dict[tuple[int, int], dict[str, float | None]] = {}
    for result in results:
        cell = result.cell
        if cell.arm in (expectation.arm, expectation.than) and cell.role in MAIN:
            value = result.value(expectation.quantity, expectation.step)
            if value is not None and expectation.quantity == "update":
                value /= cell.lr
            found.setdefault((cell.depth, cell.seed), {})[cell.arm] = value
    points: list[tuple[int, float | None]] = []
    for (depth, _), by_arm in sorted(found.items()):
        one, other = by_arm.get(expectation.arm), by_arm.get(expectation.than)
        points.append((depth, None if one is None or other is None else _over(one, other)))
    return points


def _over(one: float, other: float) -> float:
    """Returns a ratio: NaN where a run diverged, and 0, which is as little use, where the other number is zero."""
    if not math.isfinite(one) or not math.isfinite(other):
        return math.nan
    return one / other if other else 0.0


def fit(points: Points) -> Line | None:
    """Returns the power law through the points that there are, or None where it cannot be fitted."""
    known = [(depth, value) for depth, value in points if value is not None]
    return power_law([depth for depth, _ in known], [value for _, value in known])


def ratio_of(points: Points) -> Estimate | None:
    """Returns the geometric mean of the ratios that there are."""
    known = [(depth, value) for depth, value in points if value is not None]
    return ratio([depth for depth, _ in known], [value for _, value in known])


def recorded_steps(quantity: str, results: Sequence[Result]) -> list[int]:
    """Returns the steps at which any run recorded a quantity."""
    records = [result.record for result in results if result.record is not None]
    return sorted({step for record in records if quantity in record.series for step in record.series[quantity].steps})


def _estimated(claim: Claim, expectation: Numeric, points: Points) -> Estimate | Part:
    """Returns the slope or the ratio to decide on, or the part where there is none that has an interval."""
    says, label = describe(claim, expectation), claim.labels[expectation.arm]
    if all(value is None for _, value in points):
        pairs = isinstance(expectation, Steeper | Larger)
        return Part(says, "not run", label, "no pairs of runs have recorded it" if pairs else "no run has recorded it")
    if isinstance(expectation, Larger):
        estimate, kind, few = ratio_of(points), "ratio", "runs"
    else:
        line = fit(points)
        estimate, kind, few = line.slope if line else None, "slope", "depths"
    if estimate is None or estimate.lo is None or estimate.hi is None:
        brief = f"{label} has no {kind}: {_odd(expectation, points, few)}"
        return Part(says, "inconclusive", brief, _counted(expectation, points))
    return estimate


def _counted(expectation: Numeric, points: Points) -> str:
    """Returns how many of the runs there are, and how many of those are not finite."""
    known = sum(value is not None for _, value in points)
    counted = f"{known} of {len(points)} {_of(expectation)}, {len({depth for depth, _ in points})} depths"
    return "; ".join(filter(None, (counted, _diverged(expectation, points))))


def _odd(expectation: Numeric, points: Points, few: str) -> str:
    """Returns why there is no estimate with an interval."""
    if diverged := _diverged(expectation, points):
        return diverged
    usable = all(value is None or value > 0 for _, value in points)
    return f"too few {few}" if usable else "a number is zero somewhere"


def _diverged(expectation: Numeric, points: Points) -> str:
    """Returns how many runs diverged: they were measured, but no finite number came of it. Nothing where none did."""
    count = sum(value is not None and not math.isfinite(value) for _, value in points)
    return f"{count} of {len(points)} {_of(expectation)} diverged (not finite)" if count else ""


def _of(expectation: Numeric) -> str:
    return "pairs of runs" if isinstance(expectation, Steeper | Larger) else "runs"


def _decided(
    claim: Claim,
    expectation: Numeric,
    estimate: Estimate,
    points: Points,
    right: bool,
    wrong: bool,
    topic: str,
    bars: str = "",
) -> Part:
    kind = "ratio" if isinstance(expectation, Larger) else "slope"
    if isinstance(expectation, Steeper):
        kind = "difference of slopes"
    brief = f"{claim.labels[expectation.arm]} {estimate.value:.2f}"
    detail = f"{kind} {estimate.value:.2f} ({spread(estimate)}), {_counted(expectation, points)}"
    told = f" ({bars})" if bars else ""
    if any(value is None for _, value in points):
        verdict: Verdict = "inconclusive"
        detail = f"{detail}: a missing run is no measurement"
    elif not right and not wrong:
        verdict, told = "inconclusive", f" ({', '.join(filter(None, (bars, spread(estimate))))})"
    else:
        verdict = "supported" if right else "refuted"
    return Part(describe(claim, expectation), verdict, f"{brief}{told}", detail, topic)


def _ends(estimate: Estimate) -> tuple[float, float]:
    assert estimate.lo is not None
    assert estimate.hi is not None
    return estimate.lo, estimate.hi
