"""Whether models train: the judges of `Trains` and `Dies`."""

import math
from collections.abc import Sequence
from dataclasses import replace

from normscale.claims.claim import Claim, Verdict
from normscale.claims.expect import Dies, Trains
from normscale.claims.fit import mean
from normscale.claims.results import MAIN, ROLES, Finding, Measured, Part, Result, by_depth, listed, worst
from normscale.claims.state import AT_UNIGRAM, Label


def describe(claim: Claim, expectation: Trains | Dies) -> str:
    """Returns the expectation as a sentence."""
    label = claim.labels[expectation.arm]
    if isinstance(expectation, Trains):
        return f"{label} trains at {_blocks(expectation.at, expectation.at_least)}, in every seed"
    others = " or ".join(claim.labels[arm] for arm in expectation.beside)
    beside = f", where {others} trains" if others else ""
    at = _blocks((), expectation.at_least)
    return f"{label} is stuck or diverges at {at}, in every seed and at a 3x lower learning rate{beside}"


def judge_trains(claim: Claim, expectation: Trains, results: Sequence[Result]) -> Part:
    label, says = claim.labels[expectation.arm], describe(claim, expectation)
    found = by_depth(results, expectation.arm, expectation.at, expectation.at_least)
    runs = [result for depth in found for result in found[depth]]
    if not runs or set(expectation.at) - set(found):
        return Part(says, "not run", f"{label} was not run there", "no such run in this profile")
    detail = "; ".join(f"{depth} blocks: {_states(found[depth])}" for depth in found)
    bad = [result for result in runs if result.state.label != "trained"]
    if not bad:
        smallest = min(_gap(result) for result in runs)
        at = listed(found)
        return Part(says, "supported", f"{label} trains at {at} blocks (gap at least {smallest:.2f} nats)", detail)
    dead = [result for result in bad if result.state.dead]
    if not dead:
        return Part(says, _unknown(runs), f"{label} {_fate(bad[0])} at {bad[0].cell.depth} blocks", detail)
    verdict, first, how = _lasting(expectation.arm, dead, results)
    return Part(says, verdict, f"{label} {_fate(first)} at {first.cell.depth} blocks{how}", detail)


def _lasting(arm: str, dead: list[Result], results: Sequence[Result]) -> tuple[Verdict, Result, str]:
    """Returns whether one of these deaths lasts at a lower learning rate and so refutes, with that run and a remark."""
    lower = by_depth(results, arm, (), 0, roles=("low-lr",))
    for result in dead:
        low = lower.get(result.cell.depth, [])
        if low and all(other.state.dead for other in low):
            return "refuted", result, ", at a 3x lower learning rate too"
    tried = dead[0].cell.depth in lower
    how = ", but not at a 3x lower learning rate" if tried else ", where no lower learning rate was tried"
    return "inconclusive", dead[0], how


def judge_dies(claim: Claim, expectation: Dies, results: Sequence[Result]) -> Part:
    label, says = claim.labels[expectation.arm], describe(claim, expectation)
    found = by_depth(results, expectation.arm, (), expectation.at_least)
    if not found:
        return Part(says, "not run", f"{label} was not run there", "no such run in this profile")
    long = by_depth(results, expectation.arm, (), expectation.at_least, roles=("long",))
    findings = [_dies_at(claim, expectation, depth, runs, results) for depth, runs in found.items()]
    findings += [
        _repeated(label, depth, runs, "over 5x more steps", f"5x steps: {_states(runs)}")
        for depth, runs in long.items()
    ]
    decided = worst(findings)
    brief = decided.brief or f"{label} {_death([run for runs in found.values() for run in runs], min(found))}"
    return Part(says, decided.verdict, brief, "; ".join(finding.detail for finding in findings))


def _dies_at(claim: Claim, expectation: Dies, depth: int, runs: list[Result], results: Sequence[Result]) -> Finding:
    """Returns what the runs of one depth say; the low-lr runs are part of it."""
    label = claim.labels[expectation.arm]
    low = by_depth(results, expectation.arm, (depth,), None, roles=("low-lr",)).get(depth, [])
    detail = f"{depth} blocks: {_states(runs)}" + (f"; lr/3, {depth} blocks: {_states(low)}" if low else "")
    found = _repeated(label, depth, runs, "", detail)
    if found.verdict != "supported":
        return found
    if not low:
        brief = f"{label} at {depth} blocks was not tried at a 3x lower learning rate"
        return replace(found, verdict="inconclusive", brief=brief)
    lower = _repeated(label, depth, low, "at a 3x lower learning rate", detail)
    if lower.verdict != "supported":
        return lower
    brief = _alone(claim, expectation, depth, results)
    return replace(found, verdict="inconclusive", brief=brief) if brief else found


def _alone(claim: Claim, expectation: Dies, depth: int, results: Sequence[Result]) -> str:
    """Returns why the death at a depth says nothing: no scheme beside it trains there, or none is known to.

    Nothing where one trains, or where none was to stand beside it.
    """
    unknown = []
    for arm in expectation.beside:
        runs = by_depth(results, arm, (depth,), None).get(depth, [])
        labels = {result.state.label for result in runs}
        if labels == {"trained"}:
            return ""
        if labels <= {"trained", "missing"}:  # one that was tried and did not train is known not to
            fate = "has a run missing" if runs else "was not run there"
            unknown.append(f"{claim.labels[arm]} {fate}")
    if unknown:
        return f"at {depth} blocks no other scheme is seen to train: {', '.join(unknown)}"
    return f"at {depth} blocks no other scheme trains either" if expectation.beside else ""


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


def measure(claim: Claim, results: Sequence[Result]) -> list[Measured]:
    """Returns the gap to the unigram entropy of every group of seeds, of the arms that are asked whether they train."""
    groups: dict[tuple[str, str, int], list[Result]] = {}
    for result in results:
        if claim.asks_training(result.cell.arm) and result.cell.role != "sweep":
            role = "" if result.cell.role in MAIN else f" {result.cell.role}"
            groups.setdefault((result.cell.arm, role, result.cell.depth), []).append(result)
    numbers = []
    for (arm, role, depth), runs in groups.items():
        gaps = [gap for run in runs if math.isfinite(gap := _gap(run))]
        if gaps:
            said = f"{claim.labels[arm]}, {depth} blocks{ROLES.get(role.strip(), '')}: gap to the unigram entropy"
            numbers.append(Measured.of(f"{arm} L{depth}{role} gap", said, mean(gaps), "nats"))
    return numbers


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
    return f"{at_least} and more blocks" if at_least is not None else f"{listed(at)} blocks"
