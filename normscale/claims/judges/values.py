"""Any number of a run, as a mean over seeds (of rates the geometric one): the judge of `Value`.

Supported when the whole 95 % interval lies strictly beyond the bar, or strictly between the two; refuted when the
whole of it lies on the other side of one of them, the bar included; else inconclusive. Where runs broke off, and the
number is the worst there is, there is no mean: then all seeds have to lie on that side. Rates that runs tolerated
refute nothing where they are bounds: at the end of a ramp, or so near each other that the same evaluation has both.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from normscale.claims.claim import Claim, Verdict
from normscale.claims.derived import RATE_TOLERATED
from normscale.claims.expect import Value, When
from normscale.claims.fit import Estimate, mean, ratio
from normscale.claims.results import MAIN, Measured, Part, Result

RATES = frozenset({RATE_TOLERATED})
"""Numbers whose mean over seeds is the geometric one, since seeds differ in them by factors: about an arithmetic mean
of learning rates an interval can reach below 0, where there are none."""

WHEN: dict[When, str] = {
    "first": " at the beginning",
    "last": "",
    "max": ", at its largest",
    "growth": ", at the end over the beginning",
    "drift": ", how far the end is from the beginning",
}


def describe(claim: Claim, expectation: Value) -> str:
    """Returns the expectation as a sentence."""
    return f"{_subject(claim, expectation)} is {_bars(expectation)}"


def judge_value(claim: Claim, expectation: Value, results: Sequence[Result]) -> Part:
    says, subject = describe(claim, expectation), _subject(claim, expectation)
    values = values_of(expectation, results)
    known = [value for value in values if value is not None]
    if not known:
        return Part(says, "not run", f"{subject}: not measured", "no run of this profile has it")
    topic, brief = f"{_number(claim, expectation)} ({_bars(expectation)} expected)", _who(claim, expectation)
    counted = f"{len(known)} of {len(values)} {'pairs of runs' if expectation.than else 'runs'}"
    if any(map(math.isinf, known)) and not any(map(math.isnan, known)):
        return _with_divergence(expectation, values, known, says, counted, brief, topic)
    estimate = _estimate(expectation, known)
    if estimate is None:
        odd = "not finite" if not all(map(math.isfinite, known)) else "zero or negative, so that there is no ratio"
        odd = "none, as nothing was learnt," if expectation.number in RATES else odd
        return Part(says, "inconclusive", f"{subject}: {odd} in some run", counted)
    told = f"{estimate.value:.3g}"
    detail = f"{told}{_spread(estimate) or ' (one run)'}, {counted}"
    if len(known) < len(values):
        return Part(says, "inconclusive", f"{told} ({brief})", f"{detail}: a missing run is no measurement", topic)
    if estimate.lo is None or estimate.hi is None:
        return Part(says, "inconclusive", f"{told} ({brief}; one seed has no interval)", detail, topic)
    verdict = _verdict(expectation, estimate.lo, estimate.hi)
    if verdict == "refuted" and (bound := _bound(expectation, known, results)):
        return Part(says, "inconclusive", f"{told} ({brief}; {bound})", f"{detail}; {bound}", topic)
    spread = f"{_interval(estimate)}; " if verdict == "inconclusive" else ""
    return Part(says, verdict, f"{told} ({spread}{brief})", detail, topic)


def _with_divergence(
    expectation: Value,
    values: Sequence[float | None],
    known: Sequence[float],
    says: str,
    counted: str,
    brief: str,
    topic: str,
) -> Part:
    """Returns the part where some runs broke off, all of one arm if it compares two."""
    told = f"{sum(map(math.isinf, known))} of {len(known)} diverged"
    detail = f"{told}, the others {', '.join(f'{v:.3g}' for v in known if math.isfinite(v)) or 'none'}; {counted}"
    verdict: Verdict = "inconclusive"
    if len(known) == len(values) and len(known) > 1:
        verdict = _verdict(expectation, min(known), max(known))
    return Part(says, verdict, f"{told} ({brief})", detail, topic)


def measure(claim: Claim, results: Sequence[Result]) -> list[Measured]:
    """Returns what the `Value` expectations look at, then the same numbers of every other arm.

    And those numbers of the claim that no expectation looks at, as they are at the end.
    """
    found: dict[str, Measured] = {}
    expectations = [e for e in (*claim.expect, *claim.control) if isinstance(e, Value)]
    for expectation in expectations:
        known = [value for value in values_of(expectation, results) if value is not None]
        if known and (estimate := _estimate(expectation, known)) is not None:
            found[name_of(expectation)] = Measured.of(
                name_of(expectation), _subject(claim, expectation), estimate, _unit(expectation)
            )
    depths = {arm: sorted({r.cell.depth for r in results if r.cell.arm == arm}) for arm in claim.arms}
    judged = dict.fromkeys((e.number, e.when) for e in expectations)
    beside: dict[tuple[str, When], None] = {(n, "last"): None for n in claim.numbers if n not in {n for n, _ in judged}}
    for number, when in judged | beside:
        for alone in (Value(arm, number, at=depth, when=when) for arm in claim.arms for depth in depths[arm]):
            known = [value for value in values_of(alone, results) if value is not None]
            if known and name_of(alone) not in found and (estimate := _estimate(alone, known)) is not None:
                found[name_of(alone)] = Measured.of(name_of(alone), _subject(claim, alone), estimate, _unit(alone))
    return list(found.values())


def name_of(expectation: Value) -> str:
    """Returns the name of a number for programs, e.g. `pre L12 gap` or `rms-1024 over ln-1024 kernel_s`."""
    arm = expectation.arm + (f" L{expectation.at}" if expectation.at else "")
    when = "" if expectation.when == "last" else f" {expectation.when}"
    number = f"{expectation.number}{when}"
    if expectation.than is None:
        return f"{arm} {number}"
    other = expectation.than + (f" L{_than_at(expectation)}" if expectation.at else "")
    beyond = f" beyond {' minus '.join(expectation.beyond)}" if expectation.beyond else ""
    return f"{arm} {_word(expectation)} {other}{beyond} {number}"


def values_of(expectation: Value, results: Sequence[Result]) -> list[float | None]:
    """Returns the number of every seed, or of every pair of seeds; None where a run is missing."""
    return list(_values(expectation, results).values())


def _values(expectation: Value, results: Sequence[Result]) -> dict[int, float | None]:
    """Returns the same by seed."""
    own = _by_seed(expectation, expectation.arm, expectation.at, results)
    if expectation.than is None:
        return own
    other = _by_seed(expectation, expectation.than, _than_at(expectation), results)
    found = {seed: _compared(expectation, own.get(seed), other.get(seed)) for seed in sorted(own.keys() | other.keys())}
    if expectation.beyond is None:
        return found
    arm, than = expectation.beyond
    base = _values(replace(expectation, arm=arm, than=than, beyond=None), results)
    return {
        seed: _compared(expectation, found.get(seed), base.get(seed)) for seed in sorted(found.keys() | base.keys())
    }


def _than_at(expectation: Value) -> int:
    return expectation.at if expectation.than_at is None else expectation.than_at


def _by_seed(expectation: Value, arm: str, at: int, results: Sequence[Result]) -> dict[int, float | None]:
    own = [r for r in results if (r.cell.arm, r.cell.depth) == (arm, at) and r.cell.role in MAIN]
    return {r.cell.seed: r.number(expectation.number, expectation.when) for r in own}


def _compared(expectation: Value, one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return None
    if expectation.compare == "difference":
        return one - other
    return one / other if other and math.isfinite(other) else math.nan


def _estimate(expectation: Value, known: Sequence[float]) -> Estimate | None:
    if not all(math.isfinite(value) for value in known):
        return None
    if expectation.than is not None and expectation.compare == "ratio":
        return ratio([0.0] * len(known), known)
    return averaged(expectation.number, known) if expectation.than is None else mean(known)


def averaged(number: str, values: Sequence[float]) -> Estimate:
    """Returns the mean of a number over seeds; of rates the geometric one, where all are positive."""
    return (ratio([0.0] * len(values), values) if number in RATES else None) or mean(values)


def _bound(expectation: Value, known: Sequence[float], results: Sequence[Result]) -> str:
    """Returns why what is known of rates is a bound, and nothing if it is more."""
    if expectation.number not in RATES:
        return ""
    own = [r for r in results if (r.cell.arm, r.cell.depth) == (expectation.arm, expectation.at)]
    rates = [(r.number(expectation.number, expectation.when), r.cell.lr) for r in own if r.cell.role in MAIN]
    if expectation.above is not None and any(rate is not None and math.isclose(rate, lr) for rate, lr in rates):
        return "a run stood to the end of its ramp"
    return "equal in some pair" if expectation.than is not None and 1.0 in known else ""


def _verdict(expectation: Value, lo: float, hi: float) -> Verdict:
    above, below = expectation.above, expectation.below
    if (above is None or above < lo) and (below is None or hi < below):
        return "supported"
    wrong = (above is not None and hi <= above) or (below is not None and lo >= below)
    return "refuted" if wrong else "inconclusive"


def _subject(claim: Claim, expectation: Value) -> str:
    arm, number = _arm(claim, expectation), _number(claim, expectation)
    if expectation.than is None:
        return f"{arm}: {number}"
    return f"{arm}: {number}, {_word(expectation)} that of {_other(claim, expectation)}{_beyond(claim, expectation)}"


def _who(claim: Claim, expectation: Value) -> str:
    """Returns whose number it is: the arm, or the arm over (or minus) the other."""
    arm = _arm(claim, expectation)
    if expectation.than is None:
        return arm
    return f"{arm} {_word(expectation)} {_other(claim, expectation)}{_beyond(claim, expectation)}"


def _arm(claim: Claim, expectation: Value) -> str:
    return claim.labels[expectation.arm] + (f", {expectation.at} blocks" if expectation.at else "")


def _other(claim: Claim, expectation: Value) -> str:
    at = _than_at(expectation)
    return claim.labels[expectation.than or ""] + (f", {at} blocks" if at != expectation.at else "")


def _beyond(claim: Claim, expectation: Value) -> str:
    if expectation.beyond is None:
        return ""
    arm, than = (claim.labels[name] for name in expectation.beyond)
    return f", beyond that of {arm} minus {than}"


def _number(claim: Claim, expectation: Value) -> str:
    return claim.numbers.get(expectation.number, expectation.number) + WHEN[expectation.when]


def _word(expectation: Value) -> str:
    return "over" if expectation.compare == "ratio" else "minus"


def _bars(expectation: Value) -> str:
    if expectation.above is not None and expectation.below is not None:
        return f"between {expectation.above:g} and {expectation.below:g}"
    if expectation.above is not None:
        return f"above {expectation.above:g}"
    return "finite" if expectation.below is None else f"below {expectation.below:g}"


def _unit(expectation: Value) -> str:
    return "1" if expectation.than is not None and expectation.compare == "ratio" else ""


def _interval(estimate: Estimate) -> str:
    return f"95 % {estimate.lo:.3g}..{estimate.hi:.3g}"


def _spread(estimate: Estimate) -> str:
    return "" if estimate.lo is None or estimate.hi is None else f" ({_interval(estimate)})"
