"""The judge: what a claim's runs say about its expectation. Pure functions of records, shared by runner and report.

A part of a claim (one expectation) is refuted, inconclusive, supported or not run; the claim is refuted if a part is,
else inconclusive if a part is, else supported. A control that fails makes the whole claim inconclusive: a protocol
under which nothing trains says nothing about depth. A run that is missing (a lost worker) is no measurement, so its
part is inconclusive; a run that diverged is one. A smoke run is never a verdict.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from normscale.claims.claim import Cell, Claim, Dies, Expectation, ProfileName, Role, Slope, Trains, Verdict
from normscale.claims.fit import Estimate, Line, mean, power_law
from normscale.claims.state import AT_UNIGRAM, Label, State, state_of
from normscale.tracking.spool import RunRecord

WORST_FIRST: tuple[Verdict, ...] = ("refuted", "inconclusive", "not run", "supported")
MAIN: tuple[Role, ...] = ("main", "control")
ROLES = {"low-lr": ", 3x lower learning rate over 3x the steps", "long": ", 5x more steps"}


@dataclass(frozen=True)
class Result:
    """A cell and what its run left; None where there is nothing."""

    cell: Cell
    record: RunRecord | None

    @cached_property
    def state(self) -> State:
        return state_of(self.record)

    def value(self, quantity: str, step: int) -> float | None:
        """Returns a recorded scalar at a step, or None where the run did not record it or did not finish."""
        if self.record is None or not self.record.finished or quantity not in self.record.series:
            return None
        series = self.record.series[quantity]
        return series.values[series.steps.index(step)] if step in series.steps else None


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


@dataclass(frozen=True)
class Judgement:
    """The verdict of a claim, one line of it, its numbers and its parts."""

    verdict: Verdict
    headline: str
    measured: tuple[Measured, ...] = ()
    parts: tuple[Part, ...] = ()
    control: tuple[Part, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Returns the verdict as JSON can hold it; a number that is not finite becomes null."""
        measured = [{key: _finite(value) for key, value in asdict(item).items()} for item in self.measured]
        parts, control = ([asdict(part) for part in parts] for parts in (self.parts, self.control))
        return {
            "verdict": self.verdict,
            "headline": self.headline,
            "measured": measured,
            "parts": parts,
            "control": control,
        }


def judge(claim: Claim, profile: ProfileName, results: Sequence[Result]) -> Judgement:
    """Returns the verdict of a claim from the runs of one profile."""
    measured = tuple(_measure(claim, results))
    done = sum(result.record is not None and result.record.finished for result in results)
    if profile == "smoke":
        ran = f"{done} of {len(results)} runs ended"
        return Judgement(
            "not run", f"NOT RUN - a smoke run shows that the code runs and judges nothing ({ran})", measured
        )
    if not done:
        return Judgement("not run", f"NOT RUN - none of the {len(results)} runs has ended")
    control = tuple(_trains(claim, expectation, results) for expectation in claim.control)
    parts = tuple(_judge_part(claim, expectation, results) for expectation in claim.expect)
    failed = [part for part in control if part.verdict != "supported"]
    verdicts = {part.verdict for part in parts}
    verdict: Verdict = "supported"
    if failed or "inconclusive" in verdicts or "not run" in verdicts:
        verdict = "inconclusive"
    if "refuted" in verdicts and not failed:
        verdict = "refuted"
    briefs = [f"the control failed: {part.brief}" for part in failed] or _told(parts, verdict)
    missing = f" ({len(results) - done} of {len(results)} runs missing)" if done < len(results) else ""
    headline = f"{verdict.upper()} - {'; '.join(briefs)}{missing}"
    return Judgement(verdict, headline, measured, parts, control)


def _told(parts: Sequence[Part], verdict: Verdict) -> list[str]:
    """Returns the briefs of the parts, those that decided first, the others under their own verdict.

    Parts about one topic are listed after it; a topic that was named last is not named again.
    """
    told, named = [], ""
    for kind in WORST_FIRST:
        own = [part for part in parts if part.verdict == kind]
        said = []
        for topic in dict.fromkeys(part.topic for part in own):
            briefs = [part.brief for part in own if part.topic == topic]
            if not topic:
                said += briefs
                continue
            said.append(", ".join(briefs) if topic == named else f"{topic}: {', '.join(briefs)}")
            named = topic
        if said:
            told.append("; ".join(said) if kind == verdict else f"{kind}: {', '.join(said)}")
    return told


def describe(claim: Claim, expectation: Expectation) -> str:
    """Returns an expectation as a sentence."""
    label = claim.labels[expectation.arm]
    match expectation:
        case Trains():
            return f"{label} trains at {_blocks(expectation.at, expectation.at_least)}, in every seed"
        case Dies():
            others = " or ".join(claim.labels[arm] for arm in expectation.beside)
            beside = f", where {others} trains" if others else ""
            at = _blocks((), expectation.at_least)
            return f"{label} is stuck or diverges at {at}, in every seed and at a 3x lower learning rate{beside}"
        case Slope():
            quantity, bar = expectation.quantity, f"{expectation.side} {expectation.bar:g}"
            steps = _steps(expectation.step)
            return f"{label}: the log-log slope of the {quantity} over depth, after {steps}, is {bar}"


def fit(expectation: Slope, results: Sequence[Result]) -> Line | None:
    """Returns the power law over depth of a slope expectation's quantity, or None where it cannot be fitted."""
    points = [(result.cell.depth, value) for result, value in values_of(expectation, results) if value is not None]
    return power_law([depth for depth, _ in points], [value for _, value in points])


def values_of(expectation: Slope, results: Sequence[Result]) -> list[tuple[Result, float | None]]:
    """Returns the runs of a slope and what each recorded; runs at another learning rate or length are left out."""
    own = [result for result in results if result.cell.arm == expectation.arm and result.cell.role in MAIN]
    return [(result, result.value(expectation.quantity, expectation.step)) for result in own]


def _judge_part(claim: Claim, expectation: Expectation, results: Sequence[Result]) -> Part:
    judges: dict[type, Callable[..., Part]] = {Trains: _trains, Dies: _dies, Slope: _slope}
    return judges[type(expectation)](claim, expectation, results)


def _trains(claim: Claim, expectation: Trains, results: Sequence[Result]) -> Part:
    label, says = claim.labels[expectation.arm], describe(claim, expectation)
    found = _by_depth(results, expectation.arm, expectation.at, expectation.at_least)
    runs = [result for depth in found for result in found[depth]]
    if not runs or set(expectation.at) - set(found):
        return Part(says, "not run", f"{label} was not run there", "no such run in this profile")
    detail = "; ".join(f"{depth} blocks: {_states(found[depth])}" for depth in found)
    bad = [result for result in runs if result.state.label != "trained"]
    if not bad:
        smallest = min(_gap(result) for result in runs)
        at = _listed(found)
        return Part(says, "supported", f"{label} trains at {at} blocks (gap at least {smallest:.2f} nats)", detail)
    dead = [result for result in bad if result.state.dead]
    first = (dead or bad)[0]
    brief = f"{label} {_fate(first)} at {first.cell.depth} blocks"
    return Part(says, "refuted" if dead else _unknown(runs), brief, detail)


def _dies(claim: Claim, expectation: Dies, results: Sequence[Result]) -> Part:
    label, says = claim.labels[expectation.arm], describe(claim, expectation)
    found = _by_depth(results, expectation.arm, (), expectation.at_least)
    if not found:
        return Part(says, "not run", f"{label} was not run there", "no such run in this profile")
    long = _by_depth(results, expectation.arm, (), expectation.at_least, roles=("long",))
    low = _by_depth(results, expectation.arm, (), expectation.at_least, roles=("low-lr",))
    findings = [_dies_at(claim, expectation, depth, runs, results) for depth, runs in found.items()]
    findings += [
        _repeated(label, depth, runs, "over 5x more steps", f"5x steps: {_states(runs)}")
        for depth, runs in long.items()
    ]
    details = [finding.detail for finding in findings]
    details += [f"lr/3, {depth} blocks: {_states(runs)}" for depth, runs in low.items()]
    decided = worst(findings)
    brief = decided.brief or f"{label} {_death([run for runs in found.values() for run in runs], min(found))}"
    return Part(says, decided.verdict, brief, "; ".join(details))


def _dies_at(claim: Claim, expectation: Dies, depth: int, runs: list[Result], results: Sequence[Result]) -> Finding:
    """Returns what the runs of one depth say; the low-lr runs are part of it."""
    label = claim.labels[expectation.arm]
    found = _repeated(label, depth, runs, "", f"{depth} blocks: {_states(runs)}")
    if found.verdict != "supported":
        return found
    low = _by_depth(results, expectation.arm, (depth,), None, roles=("low-lr",)).get(depth, [])
    if not low:
        brief = f"{label} at {depth} blocks was not tried at a 3x lower learning rate"
        return replace(found, verdict="inconclusive", brief=brief)
    lower = _repeated(label, depth, low, "at a 3x lower learning rate", found.detail)
    if lower.verdict != "supported":
        return lower
    others = [_by_depth(results, arm, (depth,), None).get(depth, []) for arm in expectation.beside]
    trains = [bool(runs) and all(result.state.label == "trained" for result in runs) for runs in others]
    if trains and not any(trains):
        return replace(found, verdict="inconclusive", brief=f"at {depth} blocks no other scheme trains either")
    return found


def _repeated(label: str, depth: int, runs: list[Result], how: str, detail: str) -> Finding:
    """Returns supported, and no line, if all runs are dead; refuted if one trained, else inconclusive."""
    after = f" {how}" if how else ""
    verdicts: dict[Label, Verdict] = {"trained": "refuted", "missing": "inconclusive", "undecided": "inconclusive"}
    for wanted, verdict in verdicts.items():
        for result in runs:
            if result.state.label == wanted:
                return Finding(verdict, f"{label} {_fate(result)} at {depth} blocks{after}", detail)
    return Finding("supported", detail=detail)


def _death(runs: Sequence[Result], shallowest: int) -> str:
    """Returns how dead runs died: at the unigram entropy, above it, or by diverging, as their gaps say."""
    gaps = [gap for run in runs if math.isfinite(gap := _gap(run))]
    diverged = [run.state.label == "diverged" for run in runs]
    if all(diverged):
        return f"diverges from {shallowest} blocks on"
    if min(gaps) > -AT_UNIGRAM and not any(diverged):
        return f"stays at the unigram entropy from {shallowest} blocks on (gap at most {max(gaps):.2f} nats)"
    how = "is stuck or diverges" if any(diverged) else "is stuck at or above the unigram entropy"
    return f"{how} from {shallowest} blocks on (gap {min(gaps):.2f} to {max(gaps):.2f} nats)"


def _slope(claim: Claim, expectation: Slope, results: Sequence[Result]) -> Part:
    label, says = claim.labels[expectation.arm], describe(claim, expectation)
    values = values_of(expectation, results)
    known = [value for _, value in values if value is not None]
    if not known:
        return Part(says, "not run", label, "no run has recorded it")
    line = fit(expectation, results)
    detail = f"{len(known)} of {len(values)} runs, {len({result.cell.depth for result, _ in values})} depths"
    if line is None or line.slope.lo is None or line.slope.hi is None:
        usable = all(value > 0 and math.isfinite(value) for value in known)
        odd = "too few depths" if usable else f"its {expectation.quantity} is not finite or zero somewhere"
        return Part(says, "inconclusive", f"{label} has no slope: {odd}", detail)
    lo, hi, bar = line.slope.lo, line.slope.hi, expectation.bar
    topic, interval = f"slope of the {expectation.quantity} over depth (bar {bar:g})", f"95 % {lo:.2f}..{hi:.2f}"
    brief, detail = f"{label} {line.slope.value:.2f}", f"slope {line.slope.value:.2f} ({interval}), {detail}"
    if len(known) < len(values):
        return Part(says, "inconclusive", brief, f"{detail}: a missing run is no measurement", topic)
    above, not_above = lo > bar, hi <= bar
    if not above and not not_above:
        return Part(says, "inconclusive", f"{brief} ({interval})", detail, topic)
    right = above if expectation.side == "above" else not_above
    return Part(says, "supported" if right else "refuted", brief, detail, topic)


def _measure(claim: Claim, results: Sequence[Result]) -> list[Measured]:
    """Returns the numbers of a claim: slopes where it expects slopes, else the gap of every group of seeds."""
    slopes = [expectation for expectation in claim.expect if isinstance(expectation, Slope)]
    numbers = []
    for expectation in slopes:
        for step in _recorded_steps(expectation.quantity, results) or [expectation.step]:
            line = fit(Slope(expectation.arm, expectation.quantity, step, expectation.side, expectation.bar), results)
            if line:
                name, label = f"{expectation.arm} slope at step {step}", claim.labels[expectation.arm]
                said = f"{label}, slope of the {expectation.quantity} over depth after {_steps(step)}"
                numbers.append(Measured.of(name, said, line.slope, "log/log"))
    if slopes:
        return numbers
    groups: dict[tuple[str, str, int], list[Result]] = {}
    for result in results:
        role = "" if result.cell.role in MAIN else f" {result.cell.role}"
        groups.setdefault((result.cell.arm, role, result.cell.depth), []).append(result)
    for (arm, role, depth), runs in groups.items():
        gaps = [result.state.gap for result in runs if result.state.gap is not None and math.isfinite(result.state.gap)]
        if gaps:
            said = f"{claim.labels[arm]}, {depth} blocks{ROLES.get(role.strip(), '')}: gap to the unigram entropy"
            numbers.append(Measured.of(f"{arm} L{depth}{role} gap", said, mean(gaps), "nats"))
    return numbers


def _recorded_steps(quantity: str, results: Sequence[Result]) -> list[int]:
    """Returns the steps at which any run recorded a quantity."""
    records = [result.record for result in results if result.record is not None]
    return sorted({step for record in records if quantity in record.series for step in record.series[quantity].steps})


def _by_depth(
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


def _unknown(runs: list[Result]) -> Verdict:
    return "not run" if all(result.state.label == "missing" for result in runs) else "inconclusive"


def _fate(result: Result) -> str:
    state = result.state
    if state.label == "missing":
        return "has a run missing"
    verb = {"trained": "trains", "stuck": "is stuck", "diverged": "diverges", "undecided": "is undecided"}[state.label]
    return f"{verb} (gap {state.gap:.2f} nats)" if state.gap is not None and math.isfinite(state.gap) else verb


def _states(runs: list[Result]) -> str:
    """Returns e.g. "3 stuck (gap 0.01, 0.02, 0.00)"."""
    labels = [result.state.label for result in runs]
    counts = ", ".join(f"{labels.count(label)} {label}" for label in dict.fromkeys(labels))
    gaps = ", ".join("not finite" if math.isnan(_gap(r)) else f"{_gap(r):.2f}" for r in runs if r.state.gap is not None)
    return f"{counts} (gap {gaps})" if gaps else counts


def _gap(result: Result) -> float:
    return math.nan if result.state.gap is None else result.state.gap


def _blocks(at: tuple[int, ...], at_least: int | None) -> str:
    return f"{at_least} and more blocks" if at_least is not None else f"{_listed(at)} blocks"


def _steps(step: int) -> str:
    return "1 step" if step == 1 else f"{step} steps"


def _listed(depths: Any) -> str:
    words = [str(depth) for depth in depths]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
