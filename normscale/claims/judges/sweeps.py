"""The sensitivity of a model to its learning rate, and its best one: the judges of `Sensitive` and `Shifts`."""

import math
from collections.abc import Mapping, Sequence

from normscale.claims.claim import Claim, Verdict
from normscale.claims.expect import Sensitive, Shifts
from normscale.claims.fit import mean, ratio
from normscale.claims.results import Measured, Part, Result, spread
from normscale.tracking.record import ROUNDING

TOPIC = "difference of learning-rate sensitivities, nats (above 0 expected)"


def describe(claim: Claim, expectation: Sensitive) -> str:
    """Returns the expectation as a sentence."""
    one, other = _named(claim, expectation.arm, expectation.at), _named(claim, expectation.than, expectation.than_at)
    return f"{one} is more sensitive to the learning rate than {other}"


def judge_sensitive(claim: Claim, expectation: Sensitive, results: Sequence[Result]) -> Part:
    says, values = describe(claim, expectation), differences(claim, expectation, results)
    one, other = _named(claim, expectation.arm, expectation.at), _named(claim, expectation.than, expectation.than_at)
    known = [value for value in values if value is not None]
    if not known:
        return Part(says, "not run", f"{one} was not swept", "no sweep of this profile is complete")
    estimate = mean(known)
    brief = f"{one} minus {other} {estimate.value:.3f}"
    detail = (
        f"{estimate.value:.3f} ({spread(estimate, 3) or 'one pair'}), {len(known)} of {len(values)} pairs of sweeps"
    )
    if len(known) < len(values):
        return Part(says, "inconclusive", brief, f"{detail}: a missing run is no measurement", TOPIC)
    if estimate.lo is None or estimate.hi is None:
        return Part(says, "inconclusive", f"{brief} (one seed has no interval)", detail, TOPIC)
    verdict: Verdict = "inconclusive"
    if estimate.lo > ROUNDING or estimate.hi <= ROUNDING:
        verdict = "supported" if estimate.lo > ROUNDING else "refuted"
    return Part(
        says, verdict, f"{brief} ({spread(estimate, 3)})" if verdict == "inconclusive" else brief, detail, TOPIC
    )


def describe_shifts(claim: Claim, expectation: Shifts) -> str:
    """Returns the expectation as a sentence."""
    one, other = (_named(claim, arm, expectation.at) for arm in (expectation.arm, expectation.than))
    return f"the best learning rate of {one} differs from that of {other} by over {expectation.by:g} times"


def judge_shifts(claim: Claim, expectation: Shifts, results: Sequence[Result]) -> Part:
    says = describe_shifts(claim, expectation)
    topic = f"ratio of the best learning rates (over {expectation.by:g} or under {1 / expectation.by:.3g} expected)"
    own, other = (best_rates(claim, arm, expectation.at, results) for arm in (expectation.arm, expectation.than))
    pairs = [(own.get(seed), other.get(seed)) for seed in sorted(own.keys() | other.keys())]
    known = [one / two for one, two in pairs if one is not None and two is not None]
    estimate = ratio([expectation.at] * len(known), known)
    if estimate is None:
        return Part(says, "not run", "no sweep is complete", "no sweep of this profile is complete")
    brief = f"{claim.labels[expectation.arm]} over {claim.labels[expectation.than]} {estimate.value:.3g}"
    detail = f"{estimate.value:.3g} ({spread(estimate) or 'one pair'}), {len(known)} of {len(pairs)} pairs of sweeps"
    if len(known) < len(pairs):
        return Part(says, "inconclusive", brief, f"{detail}: a missing run is no measurement", topic)
    if estimate.lo is None or estimate.hi is None:
        return Part(says, "inconclusive", f"{brief} (one seed has no interval)", detail, topic)
    lo, hi = _bounds(claim.rates, own, other, estimate.lo, estimate.hi)
    bounds = f"by the steps of the sweep {lo:.3g}..{hi:.3g}"
    if lo > expectation.by + ROUNDING or hi < 1 / expectation.by - ROUNDING:
        return Part(says, "supported", brief, f"{detail}; {bounds}", topic)
    inside = 1 / expectation.by - ROUNDING <= lo and hi <= expectation.by + ROUNDING
    verdict: Verdict = "refuted" if inside else "inconclusive"
    return Part(says, verdict, f"{brief} ({bounds})", f"{detail}; {bounds}", topic)


def measure(claim: Claim, results: Sequence[Result]) -> list[Measured]:
    """Returns, of every arm and depth that was swept, the sensitivity and, where it is asked for, the best rate.

    As means over seeds.
    """
    asked = any(isinstance(expectation, Shifts) for expectation in claim.expect)
    swept = dict.fromkeys((r.cell.arm, r.cell.depth) for r in results if r.cell.role == "sweep")
    numbers = []
    for arm, depth in swept:
        known = [value for value in sensitivities(claim, arm, depth, results).values() if value is not None]
        if known:
            said = f"{_named(claim, arm, depth)}: sensitivity to the learning rate"
            numbers.append(Measured.of(f"{arm} L{depth} sensitivity", said, mean(known), "nats"))
        best = [rate for rate in best_rates(claim, arm, depth, results).values() if rate is not None]
        if asked and (estimate := ratio([depth] * len(best), best)) is not None:
            said = f"{_named(claim, arm, depth)}: best learning rate"
            numbers.append(Measured.of(f"{arm} L{depth} best rate", said, estimate, ""))
    return numbers


def differences(claim: Claim, expectation: Sensitive, results: Sequence[Result]) -> list[float | None]:
    """Returns the difference of the two sensitivities for each seed, None where a run is missing."""
    own = sensitivities(claim, expectation.arm, expectation.at, results)
    other = sensitivities(claim, expectation.than, expectation.than_at, results)
    pairs = [(own.get(seed), other.get(seed)) for seed in sorted(own.keys() | other.keys())]
    return [None if one is None or two is None else one - two for one, two in pairs]


def sensitivities(claim: Claim, arm: str, depth: int, results: Sequence[Result]) -> dict[int, float | None]:
    """Returns {seed: sensitivity} of one arm at one depth, None where a run of the sweep is missing."""
    swept = _swept(arm, depth, results)
    return {seed: _sensitivity(list(losses.values()), len(claim.rates)) for seed, losses in swept.items()}


def best_rates(claim: Claim, arm: str, depth: int, results: Sequence[Result]) -> dict[int, float | None]:
    """Returns {seed: the rate of the lowest loss}, None where a run of the sweep is missing."""
    best: dict[int, float | None] = {}
    for seed, losses in _swept(arm, depth, results).items():
        known = {rate: loss for rate, loss in losses.items() if loss is not None}
        best[seed] = min(known, key=known.__getitem__) if len(known) == len(claim.rates) else None
    return best


def _bounds(
    rates: Sequence[float],
    own: Mapping[int, float | None],
    other: Mapping[int, float | None],
    lo: float,
    hi: float,
) -> tuple[float, float]:
    """Returns the interval of a ratio of best rates, widened by what a sweep cannot see.

    Each best rate may be half a step off, and one at an end of the sweep may be any rate beyond.
    """
    step = (max(rates) / min(rates)) ** (1 / (len(rates) - 1))
    open_below = min(rates) in own.values() or max(rates) in other.values()
    open_above = max(rates) in own.values() or min(rates) in other.values()
    return 0.0 if open_below else lo / step, math.inf if open_above else hi * step


def _swept(arm: str, depth: int, results: Sequence[Result]) -> dict[int, dict[float, float | None]]:
    """Returns {seed: {rate: the loss kept, None where the run is missing}}."""
    by_seed: dict[int, dict[float, float | None]] = {}
    for result in results:
        cell = result.cell
        if (cell.arm, cell.depth, cell.role) == (arm, depth, "sweep"):
            by_seed.setdefault(cell.seed, {})[cell.lr] = kept_loss(result)
    return by_seed


def kept_loss(result: Result) -> float | None:
    """Returns the held-out loss at the end, or at initialisation where that is lower or the end is not finite."""
    if result.record is None or not result.record.finished or "loss_val" not in result.record.series:
        return None
    first, last = result.record.series["loss_val"].values[0], result.record.series["loss_val"].values[-1]
    return first if result.broke_off or not math.isfinite(last) else min(first, last)


def _sensitivity(losses: Sequence[float | None], rates: int) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return sum(known) / rates - min(known) if len(known) == rates else None


def _named(claim: Claim, arm: str, depth: int) -> str:
    return f"{claim.labels[arm]}, {depth} blocks"
