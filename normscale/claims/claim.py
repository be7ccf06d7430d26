"""What a claim is: a statement from a source, the runs that test it, and the expectation, all as data.

A claim names its runs as grids {arm: {blocks: seeds}}, one set of grids per profile. `cells` turns them into runs: one
cell per arm, depth, learning rate and seed, each a set of dotted settings on top of the claim's base. This module
imports no torch, so that claims can be listed and reports written without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import ValidationError

from normscale.claims.expect import Along, Dies, Expectation, Larger, Slope, SlopeWithin, Steeper, Thirds, Trains
from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.errors import BadInput
from normscale.measures.config import MeasureConfig

ProfileName = Literal["smoke", "cpu", "gpu", "paper"]
GPU_PROFILES: tuple[ProfileName, ...] = ("gpu", "paper")
Role = Literal["main", "control", "low-lr", "long", "sweep"]
Verdict = Literal["supported", "refuted", "inconclusive", "not run"]
FigureName = Literal["gap", "slopes", "growth", "mixed", "values", "sweep"]
Settings = Mapping[str, Any]
Grid = Mapping[str, Mapping[int, int]]
"""{arm: {blocks: number of seeds}}; the seeds of a cell are 0, 1, 2, ..."""

DECODER = ("model.M",)
LOW_LR = 3  # a dying arm is tried again at a learning rate lower by this, over as many times the steps: as far a way
LONG = 5  # ... and, for one cell of a claim, over this many times the steps
SUFFIX: dict[Role, str] = {"main": "", "control": "", "low-lr": " lr/3", "long": " x5 steps", "sweep": ""}


@dataclass(frozen=True)
class Profile:
    """How large a claim is run: the grids of its cells by role, and settings for this profile alone.

    Each cell of `sweep` is run at every one of the claim's `rates`.

    `floor` is the part of `main` and `sweep` below which the claim is not run at all, however small the budget, since
    it could not be judged; None: all of it. One seed of each low-lr cell that belongs to a cell of the floor is in it.

    `control`, `expect` and `depth_keys` stand in place of the claim's own where a profile has another task or other
    depths, as the published protocol has; the depth of every arm then goes to `depth_keys`.
    """

    main: Grid
    low_lr: Grid = field(default_factory=dict)
    long: Grid = field(default_factory=dict)
    set: Settings = field(default_factory=dict)
    floor: Grid | None = None
    sweep: Grid = field(default_factory=dict)
    control: tuple[Expectation, ...] = ()
    expect: tuple[Expectation, ...] = ()
    depth_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One run of a claim."""

    arm: str
    depth: int
    seed: int
    lr: float
    role: Role
    settings: Settings = field(default_factory=dict, compare=False)

    @property
    def group(self) -> str:
        """Returns the name shared by the seeds of a cell, e.g. `L0012 post`; of a measurement the arm alone."""
        return f"{self._at}{self.arm}{self._told}"

    @property
    def name(self) -> str:
        return f"{self._at}{self.arm} s{self.seed}{self._told}"

    @property
    def _told(self) -> str:
        return f" lr{self.lr:.1e}" if self.role == "sweep" else SUFFIX[self.role]

    @property
    def _at(self) -> str:
        return f"L{self.depth:04d} " if self.depth else ""


@dataclass(frozen=True)
class Claim:
    """One claim. `family` groups claims in MLflow; a `core` claim is part of `normscale claim run core`.

    `paper` puts a published result beside a measured one, by the measured value's name ("post L24 gap", "post-sgd
    slope at step 10"); names that nothing measured are shown too. `how` and `differs` are for a reader of the report.
    `depth_keys` names the settings that an arm's depth goes to, where it is not the number of decoder blocks alone.

    The runs of a claim that is `to_failure` are driven until they fail, so whether they train is not asked of them.

    `numbers` says in words what the numbers are that a `Value` looks at. A claim that names a `measure` trains nothing:
    its settings are the arguments of that function of `normscale.measures`, its cells have depth 0, and each takes
    about `seconds`.
    """

    id: str
    says: str
    source: str
    family: Literal["depth", "signals", "precision", "quality"]
    base: Settings
    arms: Mapping[str, Settings]
    labels: Mapping[str, str]
    profiles: Mapping[ProfileName, Profile]
    control: tuple[Expectation, ...]
    expect: tuple[Expectation, ...]
    figure: FigureName
    how: str
    differs: tuple[str, ...]
    paper: Mapping[str, str] = field(default_factory=dict)
    depth_keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    core: bool = True
    numbers: Mapping[str, str] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    measure: str | None = None
    seconds: float = 1.0
    to_failure: bool = False

    @property
    def quantities(self) -> list[str]:
        """The recorded numbers that it judges over depth."""
        judged = [e for e in self.expect if isinstance(e, Slope | SlopeWithin | Steeper | Larger)]
        return list(dict.fromkeys(expectation.quantity for expectation in judged))

    @property
    def profiles_judged(self) -> list[str]:
        """The arrays over layers that it judges."""
        return list(dict.fromkeys(e.profile for e in self.expect if isinstance(e, Thirds | Along)))

    def asks_training(self, arm: str) -> bool:
        """Returns whether it asks if this arm trains; an arm of which only a number is judged may be too short for it.

        An arm that no expectation names is shown beside the others, and goes with them. A measurement trains nothing.
        """
        if self.measure is not None or self.to_failure:
            return False
        trained, measured = set(), set()
        for expectation in (*self.expect, *self.control):
            match expectation:
                case Trains():
                    trained.add(expectation.arm)
                case Dies():
                    trained |= {expectation.arm, *expectation.beside}
                case Steeper() | Larger():
                    measured |= {expectation.arm, expectation.than}
                case Slope() | SlopeWithin():
                    measured.add(expectation.arm)
        return arm in trained or (arm not in measured and (bool(trained) or not measured))

    def at(self, profile: ProfileName) -> "Claim":
        """Returns the claim as a profile asks it, with the profile's own control, expectations and depth."""
        scale = self.profiles.get(profile, Profile(main={}))
        changes: dict[str, Any] = {}
        if scale.expect:
            changes |= {"expect": scale.expect, "control": scale.control}
        if scale.depth_keys:
            changes["depth_keys"] = dict.fromkeys(self.arms, scale.depth_keys)
        return replace(self, **changes) if changes else self

    def cells(self, profile: ProfileName) -> list[Cell]:
        """Returns the runs of a profile.

        Raises:
            BadInput: the claim has no such profile.
        """
        if profile not in self.profiles:
            raise BadInput(f"claim {self.id}: it has no profile {profile!r}; it has {', '.join(self.profiles)}")
        own, scale = self.at(profile), self.profiles[profile]
        grids: tuple[tuple[Role, Grid], ...] = (("main", scale.main), ("low-lr", scale.low_lr), ("long", scale.long))
        cells = []
        for role, grid in grids:
            for arm, depths in grid.items():
                for depth, seeds in depths.items():
                    cells += [own._cell(scale, role, arm, depth, seed) for seed in range(seeds)]
        for arm, depths in scale.sweep.items():
            swept = [(depth, seed, rate) for depth in depths for seed in range(depths[depth]) for rate in self.rates]
            cells += [own._cell(scale, "sweep", arm, depth, seed, rate) for depth, seed, rate in swept]
        return cells

    def in_floor(self, profile: ProfileName, cell: Cell) -> bool:
        """Returns whether the claim cannot be judged without this cell."""
        floor = self.profiles[profile].floor
        if floor is None:
            return True
        seeds = floor.get(cell.arm, {}).get(cell.depth, 0)
        if cell.role in ("main", "control", "sweep"):
            return cell.seed < seeds
        return cell.role == "low-lr" and seeds > 0 and cell.seed == 0

    def _cell(self, scale: Profile, role: Role, arm: str, depth: int, seed: int, lr: float | None = None) -> Cell:
        if arm not in self.arms:
            raise BadInput(f"claim {self.id}: the grid names an arm {arm!r}; the arms are {', '.join(self.arms)}")
        settings = {**self.base, **scale.set, **self.arms[arm], "seed": seed}
        if self.measure is not None:
            return Cell(arm, depth, seed, 0.0, "main", settings)
        settings |= dict.fromkeys(self.depth_keys.get(arm, DECODER), depth)
        if lr is not None:
            settings["train.optim.lr"] = lr
        if role == "low-lr":
            settings["train.optim.lr"] /= LOW_LR
        if role in ("low-lr", "long"):
            times = LOW_LR if role == "low-lr" else LONG
            settings["train.steps"] *= times
            settings["train.eval_every"] = settings.get("train.eval_every", 0) * times
        if role == "main" and any(c.arm == arm and depth in c.at for c in self.control if isinstance(c, Trains)):
            role = "control"
        return Cell(arm, depth, seed, settings["train.optim.lr"], role, settings)


def work_config(claim: Claim, cell: Cell, runs: str, uri: str | None) -> RunConfig | MeasureConfig:
    """Returns what a cell's run is, a training or a measurement, with the places its records go to.

    Raises:
        BadInput: a setting of the claim is not one the configuration knows, or has a wrong value.
    """
    if claim.measure is None:
        return run_config(claim, cell, runs, uri)
    arguments = {key: value for key, value in cell.settings.items() if key != "seed"}
    given = {"measure": claim.measure, "arguments": arguments, "seed": cell.seed, "seconds": claim.seconds}
    try:
        return MeasureConfig.model_validate({**given, "name": f"{claim.id} {cell.name}", "runs": runs})
    except ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(str(part) for part in wrong["loc"])
        raise BadInput(f"claim {claim.id}, {cell.name}: {key}: {wrong['msg']}; mend the claim") from None


def run_config(claim: Claim, cell: Cell, runs: str, uri: str | None) -> RunConfig:
    """Returns the configuration of a cell's training run, with the places its records go to.

    Raises:
        BadInput: a setting of the claim is not one the configuration knows, or has a wrong value.
    """
    places = {"name": f"{claim.id} {cell.name}", "tracking.runs": runs, "tracking.uri": uri}
    try:
        return revise(RunConfig(), {**cell.settings, **places})
    except BadInput as error:
        raise BadInput(f"claim {claim.id}, {cell.name}: {error}") from None
