import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from normscale.claims import figures
from normscale.claims.claim import Cell, Claim
from normscale.claims.discover import list_claims
from normscale.tracking.spool import RunRecord
from tests.claims.synthetic import by_depth, by_slope, record, results

THEORY = {"post-sgd": 1.05, "post-adam": 1.26, "weights-sgd": 0.03, "weights-adam": 0.51}
SLOPES = {**THEORY, "deepnorm-sgd": 0.03, "deepnorm-adam": 0.51}
ROOT = Path(__file__).resolve().parents[2]
CLAIMS: dict[str, Claim] = {claim.id: claim for claim in list_claims(ROOT / "experiments")}
DEPTH, UPDATE = CLAIMS["depth-postnorm-dies"], CLAIMS["update-bounded"]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Returns the figures that `draw` makes from now on."""
    kept: list[Figure] = []
    new = figures._new

    def keep(width: float, height: float) -> Figure:
        kept.append(new(width, height))
        return kept[-1]

    monkeypatch.setattr(figures, "_new", keep)
    return kept


def test_the_depth_figure_shows_every_seed_of_every_arm(tmp_path: Path, drawn: list[Figure]) -> None:
    made = results(DEPTH, "cpu", by_depth)
    assert figures.draw(DEPTH, made, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
    main = [result for result in made if result.cell.role in ("main", "control")]
    axes, *losses = drawn[0].axes
    points = [line for line in axes.get_lines() if line.get_marker() not in ("", "None")]
    assert len(points) == len(main)
    assert {line.get_color() for line in axes.get_lines() if line.get_label() == "Post-Norm"} == {"#d62728"}
    titles = [axis.get_title() for axis in losses]
    assert (len(titles), titles[0], titles[-1]) == (4, "2 blocks", "48 blocks")
    at_two = [result for result in main if result.cell.depth == 2]
    assert len(losses[0].get_lines()) == 2 * len(at_two)  # a curve and the unigram entropy for each run


def test_runs_without_a_finite_loss_are_drawn_at_the_lower_edge(tmp_path: Path, drawn: list[Figure]) -> None:
    def make(cell: Cell) -> RunRecord:
        return record(0.5, outcome="nan") if cell.arm == "post" else record(-7.0)

    assert figures.draw(DEPTH, results(DEPTH, "cpu", make), tmp_path / "figure.png")
    low, high = drawn[0].axes[0].get_ylim()
    for line in drawn[0].axes[0].get_lines():
        values = [float(value) for value in line.get_ydata()]
        assert all(math.isfinite(value) and low <= value <= high for value in values)


def test_the_update_figure_says_the_slopes_panel_by_panel(tmp_path: Path, drawn: list[Figure]) -> None:
    assert figures.draw(UPDATE, results(UPDATE, "cpu", by_slope(SLOPES)), tmp_path / "figure.png")
    told = {axes.get_title("left"): [text.get_text() for text in axes.get_legend().texts] for axes in drawn[0].axes}
    assert [line.split(" (")[0] for line in told["SGD, after 10 steps"]] == [
        "Post-Norm: slope 1.05",
        "DeepNorm: slope 0.03",
        "DeepNorm without gains and biases: slope 0.03",
    ]
    assert [line.split(" (")[0] for line in told["Adam, after 10 steps"]] == [
        "Post-Norm: slope 1.26",
        "DeepNorm: slope 0.51",
        "DeepNorm without gains and biases: slope 0.51",
    ]


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_nothing_is_drawn_where_there_is_nothing(claim: Claim, tmp_path: Path) -> None:
    assert not figures.draw(claim, results(claim, "cpu", lambda cell: None), tmp_path / "figure.png")
    assert not figures.draw(claim, [], tmp_path / "figure.png")
    assert not (tmp_path / "figure.png").exists()


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_a_claim_that_has_only_begun_has_a_figure(claim: Claim, tmp_path: Path) -> None:
    first = claim.cells("cpu")[0]

    def make(cell: Cell) -> RunRecord | None:
        return record(0.7, updates={1: 0.1, 10: 0.5}) if cell == first else None

    assert figures.draw(claim, results(claim, "cpu", make), tmp_path / "figure.png")
