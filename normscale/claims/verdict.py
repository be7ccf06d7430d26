"""The judge: what a claim's runs say about its expectation. Pure functions of records, shared by runner and report.

A part of a claim (one expectation) is refuted, inconclusive, supported or not run; the claim is refuted if a part is,
else inconclusive if a part is, else supported. A control that fails makes the whole claim inconclusive: a protocol
under which nothing trains says nothing about depth. A run that is missing (a lost worker) is no measurement, so its
part is inconclusive; a run that diverged is one. A smoke run is never a verdict.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from normscale.claims.claim import Claim, ProfileName, Verdict
from normscale.claims.expect import (
    Along,
    Dies,
    Expectation,
    Larger,
    Sensitive,
    Shifts,
    Slope,
    SlopeWithin,
    Steeper,
    Thirds,
    Trains,
    Value,
)
from normscale.claims.judges import layers, slopes, sweeps, training, values
from normscale.claims.results import WORST_FIRST, Measured, Part, Result

JUDGES: dict[type, tuple[Callable[..., Part], Callable[..., str]]] = {
    Trains: (training.judge_trains, training.describe),
    Dies: (training.judge_dies, training.describe),
    Slope: (slopes.judge_slope, slopes.describe),
    SlopeWithin: (slopes.judge_slope_within, slopes.describe),
    Steeper: (slopes.judge_steeper, slopes.describe),
    Larger: (slopes.judge_larger, slopes.describe),
    Thirds: (layers.judge_thirds, layers.describe),
    Along: (layers.judge_along, layers.describe),
    Value: (values.judge_value, values.describe),
    Sensitive: (sweeps.judge_sensitive, sweeps.describe),
    Shifts: (sweeps.judge_shifts, sweeps.describe_shifts),
}
"""What judges a kind of expectation, and what says it in a sentence."""


TOLD = 4  # parts of a headline beside those that decided it


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
    claim = claim.at(profile)
    measured = tuple(
        number for kind in (values, sweeps, slopes, layers, training) for number in kind.measure(claim, results)
    )
    done = sum(result.record is not None and result.record.finished for result in results)
    if profile == "smoke":
        ran = f"{done}" if done == len(results) else f"{done} of {len(results)}"
        return Judgement("not run", f"SMOKE - {ran} runs ended; smoke gives no verdict", measured)
    if not done:
        return Judgement("not run", f"NOT RUN - none of the {len(results)} runs has ended")
    control = tuple(_judge_part(claim, expectation, results) for expectation in claim.control)
    parts = tuple(_judge_part(claim, expectation, results) for expectation in claim.expect)
    failed = [part for part in control if part.verdict != "supported"]
    verdicts = {part.verdict for part in parts}
    verdict: Verdict = "supported"
    if failed or "inconclusive" in verdicts or "not run" in verdicts:
        verdict = "inconclusive"
    if "refuted" in verdicts and not failed:
        verdict = "refuted"
    briefs = [f"the control does not hold: {_with_topic(part)}" for part in failed] or _told(parts, verdict)
    missing = f" ({len(results) - done} of {len(results)} runs missing)" if done < len(results) else ""
    headline = f"{verdict.upper()} - {'; '.join(briefs)}{missing}"
    return Judgement(verdict, headline, measured, parts, control)


def _with_topic(part: Part) -> str:
    return f"{part.topic}: {part.brief}" if part.topic else part.brief


def _told(parts: Sequence[Part], verdict: Verdict) -> list[str]:
    """Returns the briefs of the parts, those that decided first, the others under their own verdict.

    Parts about one topic are listed after it; a topic that was named last is not named again. Many parts that did not
    decide are counted.
    """
    told, named = [], ""
    for kind in WORST_FIRST:
        own = [part for part in parts if part.verdict == kind]
        said: list[str] = []
        if kind != verdict and len(own) > TOLD:
            told.append(f"{kind}: {len(own)} others")
            continue
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
    return JUDGES[type(expectation)][1](claim, expectation)


def _judge_part(claim: Claim, expectation: Expectation, results: Sequence[Result]) -> Part:
    return JUDGES[type(expectation)][0](claim, expectation, results)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
