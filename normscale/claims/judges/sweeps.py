"""The sensitivity of a model to its learning rate: the judge of `Sensitive`."""

import math
from collections.abc import Sequence

from normscale.claims.claim import Claim, Verdict
from normscale.claims.expect import Sensitive
from normscale.claims.fit import mean
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


def measure(claim: Claim, results: Sequence[Result]) -> list[Measured]:
    """Returns the sensitivity of every arm and depth that was swept, as a mean over seeds."""
    swept = dict.fromkeys((r.cell.arm, r.cell.depth) for r in results if r.cell.role == "sweep")
    numbers = []
    for arm, depth in swept:
        known = [value for value in sensitivities(claim, arm, depth, results).values() if value is not None]
        if known:
            said = f"{_named(claim, arm, depth)}: sensitivity to the learning rate"
            numbers.append(Measured.of(f"{arm} L{depth} sensitivity", said, mean(known), "nats"))
    return numbers


def differences(claim: Claim, expectation: Sensitive, results: Sequence[Result]) -> list[float | None]:
    """Returns the difference of the two sensitivities for each seed, None where a run is missing."""
    own = sensitivities(claim, expectation.arm, expectation.at, results)
    other = sensitivities(claim, expectation.than, expectation.than_at, results)
    pairs = [(own.get(seed), other.get(seed)) for seed in sorted(own.keys() | other.keys())]
    return [None if one is None or two is None else one - two for one, two in pairs]


def sensitivities(claim: Claim, arm: str, depth: int, results: Sequence[Result]) -> dict[int, float | None]:
    """Returns {seed: sensitivity} of one arm at one depth, None where a run of the sweep is missing."""
    by_seed: dict[int, list[float | None]] = {}
    for result in results:
        cell = result.cell
        if (cell.arm, cell.depth, cell.role) == (arm, depth, "sweep"):
            by_seed.setdefault(cell.seed, []).append(kept_loss(result))
    return {seed: _sensitivity(losses, len(claim.rates)) for seed, losses in by_seed.items()}


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
