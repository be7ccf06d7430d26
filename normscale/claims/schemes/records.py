"""What the records of claims say of schemes: which train at which depth and precision, at which rates, at what cost.

Pure functions of what the report shows. A run counts for a scheme when the scheme is all that it varies: arms with
options of a scheme, with another norm or with another init belong to their claim alone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from normscale.claims.claim import Cell, Claim, ProfileName, run_config
from normscale.claims.compact import seconds_a_step
from normscale.claims.results import MAIN, Measured
from normscale.config.schema import TASKS_OF, ModelConfig
from normscale.tracking.record import TRAINED_NATS

if TYPE_CHECKING:
    from normscale.claims.report import Reported

SIZES = frozenset(
    ("N", "M", "d", "heads", "ffn", "context", "scheme", "positions", "checkpointing", "compile", "backend")
)
"""Settings of a model that make it another size or run it in another way, but no other scheme."""


@dataclass(frozen=True)
class Place:
    """What a run is of.

    `kind` is a topology and a task, within which margins compare; `size` is what the time of a step depends on, beside
    scheme and depth.
    """

    scheme: str
    kind: str
    precision: str
    size: tuple[int | None, ...]


@dataclass(frozen=True)
class Ran:
    """One training run of a claim, as one of a scheme.

    `margin` is how far it is beyond having trained, in nats; `here` says whether its own record lies here, and not only
    what was published of it.
    """

    claim: str
    label: str
    cell: Cell
    place: Place
    state: str
    margin: float | None
    seconds_a_step: float | None
    run: str
    here: bool = field(default=True, compare=False)

    @property
    def protocol(self) -> tuple[object, ...]:
        """What the seeds of one cell share."""
        role = "main" if self.cell.role in MAIN else self.cell.role
        return self.claim, self.cell.arm, role, self.cell.lr


@dataclass(frozen=True)
class Square:
    """One place of the chart: a scheme at a depth. `best` are the runs of the protocol with the largest margin."""

    trained: int
    runs: int
    margin: float | None
    best: tuple[Ran, ...]

    @property
    def word(self) -> str:
        """Returns trains (in every seed of the best protocol), undecided (some seed still moves), mixed or fails."""
        states = {ran.state for ran in self.best}
        if "undecided" in states:
            return "undecided"
        return "fails" if "trained" not in states else "trains" if len(states) == 1 else "mixed"


def runs_of(reported: Iterable["Reported"]) -> list[Ran]:
    """Returns the ended training runs that claims ask of whether they train, each once; smoke runs are left out."""
    found: dict[str, Ran] = {}
    for one in reported:
        if one.profile is None or one.profile == "smoke" or one.claim.measure is not None:
            continue
        places = places_of(one.claim, one.profile)
        for result, run_id in zip(one.results, one.run_ids, strict=True):
            cell, state = result.cell, result.state
            asked = cell.role == "sweep" or one.claim.asks_training(cell.arm)
            if not asked or state.label == "missing" or cell not in places:
                continue
            margin = None if state.gap is None or state.label == "diverged" else state.gap - TRAINED_NATS
            found[run_id] = Ran(
                claim=one.claim.id,
                label=one.claim.labels[cell.arm],
                cell=cell,
                place=places[cell],
                state=state.label,
                margin=margin,
                seconds_a_step=seconds_a_step(result),
                run=run_id,
                here=result.record is not None,
            )
    return list(found.values())


def each_once(runs: Iterable[Ran]) -> list[Ran]:
    """Returns every run once, of a claim's and the survey's the one that comes last."""
    return list({ran.run: ran for ran in runs}.values())


def square(runs: Sequence[Ran]) -> Square | None:
    """Returns what runs of one scheme, depth and precision come to, None where there are none.

    The margin of a protocol is that of its worst seed, nothing where one diverged.
    """
    if not runs:
        return None
    protocols = [tuple(r for r in runs if r.protocol == key) for key in dict.fromkeys(r.protocol for r in runs)]
    margin, best = max(((_worst(own), own) for own in protocols), key=lambda pair: pair[0])
    trained = sum(ran.state == "trained" for ran in runs)
    return Square(trained, len(runs), margin if math.isfinite(margin) else None, best)


def _worst(runs: Sequence[Ran]) -> float:
    return min(-math.inf if ran.margin is None else ran.margin for ran in runs)


def step_time(runs: Sequence[Ran], scheme: str, beside: str = "pre") -> tuple[float, int] | None:
    """Returns how long a step takes beside another scheme's and in how many pairs: the median over claims and depths.

    Only runs of one claim, depth and size are compared, and none made here with one that was published: they were made
    together. None where no claim has both.
    """
    ratios = []
    for key in dict.fromkeys(_like(ran) for ran in runs):
        times: dict[str, list[float]] = {scheme: [], beside: []}
        for ran in runs:
            if _like(ran) == key and ran.place.scheme in times and ran.seconds_a_step is not None:
                times[ran.place.scheme].append(ran.seconds_a_step)
        if all(times.values()):
            ratios.append(median(times[scheme]) / median(times[beside]))
    return (median(ratios), len(ratios)) if ratios and scheme != beside else None


def _like(ran: Ran) -> tuple[object, ...]:
    return ran.claim, ran.here, ran.cell.depth, ran.place.kind, ran.place.precision, ran.place.size


def slopes_of(reported: Iterable["Reported"], scheme: str) -> list[tuple[str, Measured]]:
    """Returns (claim, number) for every slope over depth that claims measured of an arm of this scheme alone."""
    found = []
    for one in reported:
        if one.profile is None or one.profile == "smoke" or one.claim.measure is not None:
            continue
        schemes = {cell.arm: place.scheme for cell, place in places_of(one.claim, one.profile).items()}
        for item in one.judgement.measured:
            arm, _, rest = item.name.partition(" ")
            if rest.startswith("slope") and schemes.get(arm) == scheme:
                found.append((one.claim.id, item))
    return found


def places_of(claim: Claim, profile: ProfileName) -> dict[Cell, Place]:
    """Returns where the cells of a claim belong that vary nothing but their scheme, their size and how they train.

    A record does not hold its settings: the claim does. A cell that the claim no longer has is left out.
    """
    plain, found = ModelConfig(), {}
    for cell in claim.cells(profile):
        config = run_config(claim, cell, "runs", None)
        model, train = config.model, config.train
        if any(getattr(model, key) != getattr(plain, key) for key in ModelConfig.model_fields if key not in SIZES):
            continue
        topology = "encoder-decoder" if model.N and model.M else "encoder" if model.N else "decoder"
        kind = f"{topology}, {config.data.task or TASKS_OF[topology][0]}"
        size = (model.d, model.ffn, model.context, train.batch, train.accumulate)
        found[cell] = Place(model.scheme, kind, config.precision.compute, size)
    return found
