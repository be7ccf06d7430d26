"""The kinds of expectation a claim can have, as data; `judges` has one judging function for each.

Two kinds ask whether models train. Four look at a number that runs record, over depth. Two look at an array over the
layers of one model. `Value` looks at any number of a run, a training or a measurement, `Sensitive` and `Shifts` at the
runs of one model over learning rates.
"""

from dataclasses import dataclass
from typing import Literal

When = Literal["first", "last", "max", "growth", "drift"]


@dataclass(frozen=True)
class Trains:
    """The arm trains at these depths, in every seed. `at_least` means every depth of the grid from there on.

    A death refutes it only when it lasts at a 3x lower learning rate, as `Dies` has it; else nothing is decided.
    """

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


@dataclass(frozen=True)
class SlopeWithin:
    """The log-log slope over depth of a recorded quantity at one step lies from `lo` to `hi`."""

    arm: str
    quantity: str
    step: int
    lo: float
    hi: float


@dataclass(frozen=True)
class Steeper:
    """The arm's log-log slope over depth is more, or not more, than another's by over `by`."""

    arm: str
    than: str
    quantity: str
    step: int
    by: float
    side: Literal["more", "not more"] = "more"


@dataclass(frozen=True)
class Larger:
    """The arm's quantity is over `by` times another's, as a geometric mean over the depths that both have."""

    arm: str
    than: str
    quantity: str
    step: int
    by: float


@dataclass(frozen=True)
class Thirds:
    """The deep third of an array over layers, compared with its shallow third at the end of training.

    `ratio` is deep over shallow, `difference` is deep minus shallow; each is a mean over the layers of the third.
    """

    arm: str
    profile: str
    depth: int
    compare: Literal["ratio", "difference"]
    side: Literal["above", "below"]
    bar: float


@dataclass(frozen=True)
class Along:
    """The log-log slope of an array over the number of its layer, 1, 2, ..., lies from `lo` to `hi`."""

    arm: str
    profile: str
    depth: int
    when: Literal["first", "last"]  # the first time it was recorded, or the last
    lo: float
    hi: float


@dataclass(frozen=True)
class Value:
    """A number of an arm, as a mean over seeds, lies above one bar, below another, or between the two.

    With `than` it is the arm's number over (`ratio`, a geometric mean) or minus (`difference`) that of another arm,
    seed by seed. `at` names the depth, and `than_at` the other's where it is another; a measurement has none. Of a
    difference, `beyond` names two arms more, and what is judged is by how much it is above that of these two.
    `when` is the point of a run that the number is of: its first or last record, the largest of all, the last over the
    first (`growth`), or how far the last is from the first (`drift`).
    """

    arm: str
    number: str
    above: float | None = None
    below: float | None = None
    at: int = 0
    than: str | None = None
    than_at: int | None = None
    compare: Literal["ratio", "difference"] = "ratio"
    when: When = "last"
    beyond: tuple[str, str] | None = None


@dataclass(frozen=True)
class Sensitive:
    """The learning-rate sensitivity of an arm is above another's, as a mean over seeds, from the runs of the sweep.

    Reference: Wortsman et al. 2023, arXiv:2309.14322, section 2.2: the mean over rates of min(loss, loss at
    initialisation), minus the best loss.
    """

    arm: str
    at: int
    than: str
    than_at: int


@dataclass(frozen=True)
class Shifts:
    """The best learning rate of an arm is over `by` times another's, or as far below it, from the runs of the sweep.

    The best is that of the lowest held-out loss at the end; it is compared seed by seed, as a geometric mean. A best
    rate is known to half a step of the sweep, and at an end of the sweep it may be any beyond.
    """

    arm: str
    at: int
    than: str
    by: float


Training = Trains | Dies
Numeric = Slope | SlopeWithin | Steeper | Larger
Layered = Thirds | Along
Expectation = Training | Numeric | Layered | Value | Sensitive | Shifts
