"""A budget of time: which runs of which claims it pays for, in which order. Pure functions of costs.

The claims that tell most a minute come first: the number of expectations that a claim judges, over what its floor still
costs. Where all runs are too much, seeds go first, then cells, then whole claims, each time from the claim that tells
least; a claim is never cut below its floor, since it could not be judged. Runs that are done, or that another claim
keeps, cost nothing, so nothing is saved by leaving them out.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from normscale.claims.claim import GPU_PROFILES, Cell, Claim, ProfileName

Cells = list[tuple[Cell, str]]
"""(cell, id of its run)"""

Step = Literal["seed", "cell", "claim"]
STEPS: tuple[Step, ...] = ("seed", "cell", "claim")
SHOWN = 6  # names in a sentence about what is left out


@dataclass
class Share:
    """What a claim gets: the cells that are run, and those that are left out, with the step that they went in."""

    claim: Claim
    profile: ProfileName
    kept: Cells
    left_out: list[tuple[Cell, str, Step]] = field(default_factory=list)
    floor_s: float = 0.0

    @property
    def told_a_minute(self) -> float:
        """Returns the expectations that a minute of one core decides."""
        return len(self.claim.expect) / max(self.floor_s / 60, 1e-9)

    def floor(self) -> Cells:
        return [(cell, run) for cell, run in self.kept if self.claim.in_floor(self.profile, cell)]


def divide(
    asked: Sequence[tuple[Claim, Cells]],
    profile: ProfileName,
    costs: Mapping[str, float],
    budget_s: float,
    workers: int,
) -> list[Share]:
    """Returns what each claim gets of a budget, in the order in which they are to be run.

    `costs` are seconds of one worker by run, for the runs that are not done yet.
    """
    shares = [Share(claim, profile, list(cells)) for claim, cells in asked]
    for share in shares:
        share.floor_s = sum(costs.get(run, 0.0) for run in {run for _, run in share.floor()})
    shares.sort(key=lambda share: -share.told_a_minute)  # stable: of like worth, as the checkout has them
    purse = _Purse(shares, costs, budget_s, workers)
    dropped = [drop for step in STEPS for share in reversed(shares) for drop in _drops(share, step, purse)]
    for share, step, cells in reversed(dropped):  # what was dropped last may leave room for something cheaper
        if step == "claim" or _any_floor_kept(share):
            purse.take_back(share, cells)
    return shares


def said(share: Share, budget: str) -> list[str]:
    """Returns what is left out of a claim, and why, as sentences."""
    if not share.left_out:
        return []
    if not share.kept:
        runs = len({run for _, run, _ in share.left_out})
        floor = share.floor_s / 60
        unit = "GPU" if share.profile in GPU_PROFILES else "core"
        return [
            f"its floor takes about {floor:.0f} {unit}-minutes, for which {budget} had no room ({runs} runs in all)"
        ]
    lines = []
    for step, noun in (("seed", "further seeds"), ("cell", "cells")):
        names = [cell.name for cell, _, own in share.left_out if own == step]
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"{budget} had no room for {noun}: {', '.join(names[:SHOWN])}{more}")
    return lines


class _Purse:
    """What is paid for: the runs that claims keep, in the order of the claims, each claim's dearest first."""

    def __init__(self, shares: Sequence[Share], costs: Mapping[str, float], budget_s: float, workers: int) -> None:
        self.shares, self.costs, self.budget_s, self.workers = shares, costs, budget_s, workers

    def over(self) -> bool:
        """Returns whether it is too much for workers that each take the next run when they have ended one."""
        kept: list[dict[str, float]] = []
        seen: set[str] = set()
        for share in self.shares:
            kept.append({run: self.costs[run] for _, run in share.kept if run in self.costs and run not in seen})
            seen |= kept[-1].keys()
        if sum(sum(own.values()) for own in kept) > self.budget_s * self.workers:
            return True
        ends = [0.0] * self.workers  # a heap
        for own in kept:
            for cost in sorted(own.values(), reverse=True):
                heapq.heapreplace(ends, ends[0] + cost)
        return max(ends) > self.budget_s

    def drop(self, share: Share, step: Step, cells: Cells) -> None:
        for cell, run in cells:
            share.kept.remove((cell, run))
            share.left_out.append((cell, run, step))

    def take_back(self, share: Share, cells: Cells) -> None:
        share.kept += cells
        if self.over():
            del share.kept[-len(cells) :]
            return
        share.left_out = [item for item in share.left_out if item[:2] not in cells]


def _drops(share: Share, step: Step, purse: _Purse) -> list[tuple[Share, Step, Cells]]:
    """Drops cells of a claim one by one, the highest seeds and then the dearest first, while it is all too much."""
    if step == "claim":
        if purse.over() and any(run in purse.costs for _, run in share.kept):
            whole = list(share.kept)
            purse.drop(share, step, whole)
            return [(share, step, whole)]
        return []
    first: dict[str, int] = {}
    for cell, _ in share.kept:
        first[cell.group] = min(cell.seed, first.get(cell.group, cell.seed))
    free = [
        (cell, run)
        for cell, run in share.kept
        if run in purse.costs
        and not share.claim.in_floor(share.profile, cell)
        and (step == "cell" or cell.seed > first[cell.group])
    ]
    dropped: list[tuple[Share, Step, Cells]] = []
    for one in sorted(free, key=lambda one: (-one[0].seed, -purse.costs[one[1]])):
        if not purse.over():
            break
        purse.drop(share, step, [one])
        dropped.append((share, step, [one]))
    return dropped


def _any_floor_kept(share: Share) -> bool:
    return any(share.claim.in_floor(share.profile, cell) for cell, _ in share.kept)
