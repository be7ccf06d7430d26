"""What a claim is: a statement from a source, the runs that test it, and the expectation, all as data.

A claim names its runs as grids {arm: {blocks: seeds}}, one set of grids per profile. `cells` turns them into runs: one
cell per arm, depth, learning rate and seed, each a set of dotted settings on top of the claim's base. This module
imports no torch, so that claims can be listed and reports written without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.errors import BadInput

ProfileName = Literal["smoke", "cpu", "gpu"]
Role = Literal["main", "control", "low-lr", "long"]
Verdict = Literal["supported", "refuted", "inconclusive", "not run"]
Settings = Mapping[str, Any]
Grid = Mapping[str, Mapping[int, int]]
"""{arm: {blocks: number of seeds}}; the seeds of a cell are 0, 1, 2, ..."""

LOW_LR = 3  # a dying arm is tried again at a learning rate lower by this, over as many times the steps: as far a way
LONG = 5  # ... and, for one cell of a claim, over this many times the steps
SUFFIX: dict[Role, str] = {"main": "", "control": "", "low-lr": " lr/3", "long": " x5 steps"}


@dataclass(frozen=True)
class Trains:
    """The arm trains at these depths, in every seed. `at_least` means every depth of the grid from there on."""

    arm: str
    at: tuple[int, ...] = ()
    at_least: int | None = None


@dataclass(frozen=True)
class Dies:
    """The arm is stuck or diverges at every depth from `at_least` on, in every seed, while an arm of `beside` trains.

    A death counts only when it lasts at a 3x lower learning rate (over 3x the steps, else a slow run passes for a dead
    one) and, where the profile has long cells for the arm, over 5x more steps.
    """

    arm: str
    at_least: int
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slope:
    """The log-log slope over depth of a recorded quantity at one step lies above, or not above, a bar."""

    arm: str
    quantity: str
    step: int
    side: Literal["above", "not above"]
    bar: float


Expectation = Trains | Dies | Slope


@dataclass(frozen=True)
class Profile:
    """How large a claim is run: the grids of its cells by role, and settings for this profile alone."""

    main: Grid
    low_lr: Grid = field(default_factory=dict)
    long: Grid = field(default_factory=dict)
    set: Settings = field(default_factory=dict)


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
        """Returns the name shared by the seeds of a cell, e.g. `L0012 post`."""
        return f"L{self.depth:04d} {self.arm}{SUFFIX[self.role]}"

    @property
    def name(self) -> str:
        return f"L{self.depth:04d} {self.arm} s{self.seed}{SUFFIX[self.role]}"


@dataclass(frozen=True)
class Claim:
    """One claim. `family` groups claims in MLflow; a `core` claim is part of `normscale claim run core`.

    `paper` puts a published result beside a measured one, by the measured value's name ("post L24 gap", "post-sgd
    slope at step 10"); names that nothing measured are shown too. `how` and `differs` are for a reader of the report.
    """

    id: str
    says: str
    source: str
    family: Literal["depth", "signals"]
    base: Settings
    arms: Mapping[str, Settings]
    labels: Mapping[str, str]
    profiles: Mapping[ProfileName, Profile]
    control: tuple[Trains, ...]
    expect: tuple[Expectation, ...]
    figure: Literal["gap", "update"]
    how: str
    differs: tuple[str, ...]
    paper: Mapping[str, str] = field(default_factory=dict)
    depth_key: str = "model.M"
    core: bool = True

    def cells(self, profile: ProfileName) -> list[Cell]:
        """Returns the runs of a profile.

        Raises:
            BadInput: the claim has no such profile.
        """
        if profile not in self.profiles:
            raise BadInput(f"claim {self.id}: it has no profile {profile!r}; it has {', '.join(self.profiles)}")
        scale = self.profiles[profile]
        grids: tuple[tuple[Role, Grid], ...] = (("main", scale.main), ("low-lr", scale.low_lr), ("long", scale.long))
        cells = []
        for role, grid in grids:
            for arm, depths in grid.items():
                for depth, seeds in depths.items():
                    cells += [self._cell(scale, role, arm, depth, seed) for seed in range(seeds)]
        return cells

    def _cell(self, scale: Profile, role: Role, arm: str, depth: int, seed: int) -> Cell:
        if arm not in self.arms:
            raise BadInput(f"claim {self.id}: the grid names an arm {arm!r}; the arms are {', '.join(self.arms)}")
        settings = {**self.base, **scale.set, **self.arms[arm], self.depth_key: depth, "seed": seed}
        if role == "low-lr":
            settings["train.optim.lr"] /= LOW_LR
        if role in ("low-lr", "long"):
            times = LOW_LR if role == "low-lr" else LONG
            settings["train.steps"] *= times
            settings["train.eval_every"] = settings.get("train.eval_every", 0) * times
        if role == "main" and any(control.arm == arm and depth in control.at for control in self.control):
            role = "control"
        return Cell(arm, depth, seed, settings["train.optim.lr"], role, settings)


def run_config(claim: Claim, cell: Cell, runs: str, uri: str | None) -> RunConfig:
    """Returns the configuration of a cell's run, with the places its records go to.

    Raises:
        BadInput: a setting of the claim is not one the configuration knows, or has a wrong value.
    """
    places = {"name": f"{claim.id} {cell.name}", "tracking.runs": runs, "tracking.uri": uri}
    try:
        return revise(RunConfig(), {**cell.settings, **places})
    except BadInput as error:
        raise BadInput(f"claim {claim.id}, {cell.name}: {error}") from None
