import math
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from normscale.claims.claim import Cell, Claim
from normscale.claims.discover import list_claims
from normscale.claims.expect import Value
from normscale.claims.figures import common, drawing, gap, growth, slopes, values
from normscale.claims.fit import mean
from normscale.tracking.reader import RunRecord
from tests.claims.synthetic import SLOPES, by_depth, by_slope, by_theory, measurement, record, results

ROOT = Path(__file__).resolve().parents[2]
CLAIMS: dict[str, Claim] = {claim.id: claim for claim in list_claims(ROOT / "experiments")}
DEPTH, UPDATE = CLAIMS["depth-postnorm-dies"], CLAIMS["update-bounded"]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Returns the figures that `draw` makes from now on."""
    kept: list[Figure] = []
    new = common.new

    def keep(width: float, height: float) -> Figure:
        kept.append(new(width, height))
        return kept[-1]

    for kind in (gap, slopes, growth, values):
        monkeypatch.setattr(kind, "new", keep)
    return kept


def test_the_depth_figure_shows_every_seed_of_every_arm(tmp_path: Path, drawn: list[Figure]) -> None:
    made = results(DEPTH, "cpu", by_depth)
    assert drawing.draw(DEPTH, made, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
    main = [result for result in made if result.cell.role in ("main", "control")]
    axes, *losses = drawn[0].axes
    points = [line for line in axes.get_lines() if line.get_marker() not in ("", "None")]
    assert len(points) == len(main)
    assert {line.get_color() for line in axes.get_lines() if line.get_label() == "Post-Norm"} == {"#d62728"}
    titles = [axis.get_title() for axis in losses]
    assert (len(titles), titles[0], titles[-1]) == (4, "2 blocks", "100 blocks")
    at_two = [result for result in main if result.cell.depth == 2]
    assert len(losses[0].get_lines()) == 2 * len(at_two)  # a curve and the unigram entropy for each run


def test_runs_without_a_finite_loss_are_drawn_at_the_lower_edge(tmp_path: Path, drawn: list[Figure]) -> None:
    def make(cell: Cell) -> RunRecord:
        return record(0.5, outcome="nan") if cell.arm == "post" else record(-7.0)

    assert drawing.draw(DEPTH, results(DEPTH, "cpu", make), tmp_path / "figure.png")
    low, high = drawn[0].axes[0].get_ylim()
    for line in drawn[0].axes[0].get_lines():
        values = [float(value) for value in line.get_ydata()]
        assert all(math.isfinite(value) and low <= value <= high for value in values)


def test_the_update_figure_says_the_slopes_panel_by_panel(tmp_path: Path, drawn: list[Figure]) -> None:
    assert drawing.draw(UPDATE, results(UPDATE, "cpu", by_slope(SLOPES)), tmp_path / "figure.png")
    told = {axes.get_title("left"): [text.get_text() for text in axes.get_legend().texts] for axes in drawn[0].axes}
    assert [line.split(" (")[0] for line in told["Model update after 10 steps, SGD"]] == [
        "Post-Norm: slope 1.05",
        "DeepNorm: slope 0.03",
        "DeepNorm without gains and biases: slope 0.03",
    ]
    assert [line.split(" (")[0] for line in told["Model update after 10 steps, Adam"]] == [
        "Post-Norm: slope 1.26",
        "DeepNorm: slope 0.51",
        "DeepNorm without gains and biases: slope 0.51",
    ]


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_nothing_is_drawn_where_there_is_nothing(claim: Claim, tmp_path: Path) -> None:
    assert not drawing.draw(claim, results(claim, "cpu", lambda cell: None), tmp_path / "figure.png")
    assert not drawing.draw(claim, [], tmp_path / "figure.png")
    assert not (tmp_path / "figure.png").exists()


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_a_claim_that_has_only_begun_has_a_figure(claim: Claim, tmp_path: Path) -> None:
    first = claim.cells("cpu")[0]

    def make(cell: Cell) -> RunRecord | None:
        return by_theory(claim)(cell) if cell == first else None

    assert drawing.draw(claim, results(claim, "cpu", make), tmp_path / "figure.png")


def test_depths_to_a_thousand_are_on_one_axis(tmp_path: Path, drawn: list[Figure]) -> None:
    claim = CLAIMS["depth-deepnorm-trains"]
    assert drawing.draw(claim, results(claim, "cpu", by_theory(claim)), tmp_path / "figure.png")
    axes, *losses = drawn[0].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["6", "12", "24", "48", "100", "200", "1000"]
    assert losses[-1].get_title() == "1000 blocks"
    small = next(line for line in axes.get_lines() if line.get_label() == "DeepNorm, 128 tokens a step")
    assert small.get_linestyle() == "--"  # the same scheme under another protocol
    legend = axes.get_legend()
    assert legend is not None
    arms = [line for line in legend.get_lines() if line.get_label() in claim.labels.values()]
    assert len(arms) == 3
    assert len({(line.get_color(), line._unscaled_dash_pattern) for line in arms}) == 3  # type: ignore[attr-defined]
    assert len({(line.get_color(), line.get_fillstyle()) for line in arms}) == 3
    drawn_as = {line.get_label(): line for line in axes.get_lines()}
    for line in arms:  # the legend shows what is drawn
        assert line._unscaled_dash_pattern == drawn_as[line.get_label()]._unscaled_dash_pattern  # type: ignore[attr-defined]


def test_one_depth_alone_is_in_the_middle_of_its_axis() -> None:
    axes = common.new(6, 4).add_subplot()
    axes.plot([47, 49], [0.1, 0.2], "o")
    common.depth_axis(axes, [48])
    assert axes.get_xlim() == (24, 96)


def test_two_depths_too_near_for_both_labels_share_one() -> None:
    axes = common.new(4, 3).add_subplot()
    common.depth_axis(axes, [6, 12, 100, 110, 1000])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["6", "12", "100", "1000"]


def test_the_growth_figure_has_a_panel_for_each_array_and_only_layers_that_were_measured(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    claim = CLAIMS["growth-prenorm"]
    made = results(claim, "cpu", by_theory(claim))
    assert drawing.draw(claim, made, tmp_path / "figure.png")
    stream, angle, removal = drawn[0].axes
    drawn_lines = [
        [line for line in axes.get_lines() if len(line.get_xdata()) > 2] for axes in (stream, angle, removal)
    ]
    assert [len(lines) for lines in drawn_lines] == [6, 3, 3]  # the stream also as it was at initialisation
    assert len(drawn_lines[1][0].get_xdata()) == 24
    assert len(drawn_lines[2][0].get_xdata()) == 17  # of 24, as the records have it
    for line in drawn_lines[2]:
        assert all(math.isfinite(value) for value in line.get_ydata())
    assert [text.get_text() for text in drawn[0].legends[0].texts] == [
        "Pre-Norm, 24 blocks",
        "DeepNorm, 24 blocks",
        "Post-Norm, 12 blocks",
    ]


def test_the_figure_of_numbers_shows_where_each_arm_was_expected(tmp_path: Path, drawn: list[Figure]) -> None:
    claim = CLAIMS["ln-lossy"]
    made = {"ln": 1e-6, "rms": 0.8, "none": 0.9}
    numbers = lambda cell: measurement({"mean": made[cell.arm], "mean_share": made[cell.arm]})  # noqa: E731
    assert drawing.draw(claim, results(claim, "cpu", numbers), tmp_path / "values.png")
    axes = drawn[0].axes[0]
    assert axes.get_xscale() == "log"  # from a millionth to nearly 1
    low, high = axes.get_xlim()
    assert low < 1e-6
    assert high > 0.8
    below, above = ([*band.get_paths()[0].get_extents().extents] for band in axes.collections)
    assert below == pytest.approx([low, -0.42, 0.1, 0.42])  # LayerNorm's row, below 0.1
    assert above == pytest.approx([0.5, 0.58, high, 1.42])  # RMSNorm's, above 0.5
    titles = [panel.get_title(loc="left") for panel in drawn[0].axes]
    assert all(len(line) <= values.WRAP for title in titles for line in title.splitlines())


def test_a_figure_of_more_numbers_than_it_has_panels_names_the_others(tmp_path: Path, drawn: list[Figure]) -> None:
    names = [f"number {i}" for i in range(8)]
    claim = replace(CLAIMS["ln-lossy"], expect=tuple(Value("ln", name, above=0.5) for name in names))
    made = results(claim, "cpu", lambda _cell: measurement(dict.fromkeys(names, 1.0)))
    assert drawing.draw(claim, made, tmp_path / "values.png")
    assert len(drawn[0].axes) == 6
    assert drawn[0].get_supxlabel().endswith("In the table alone: number 6; number 7.")


def test_a_figure_of_rates_says_how_their_mean_is_made_and_what_0_is(tmp_path: Path, drawn: list[Figure]) -> None:
    claim = CLAIMS["depth-max-lr"]
    for least in (0.0, 1e-2):
        made = {"pre": record(numbers={"rate_tolerated": 3e-2}), "post": record(numbers={"rate_tolerated": least})}
        assert drawing.draw(
            claim, results(claim, "cpu", lambda cell, made=made: made.get(cell.arm)), tmp_path / "r.png"
        )
    first, second = (" ".join(figure.get_supxlabel().splitlines()) for figure in drawn)
    assert second == "Circles: one seed each. Bar: geometric mean and 95 % interval."
    assert first == f"{second} 0: nothing was learnt while the rate rose."


def test_an_axis_of_numbers_has_its_zeros_and_ticks_that_can_be_read(tmp_path: Path, drawn: list[Figure]) -> None:
    claim = CLAIMS["ln-lossy"]
    made = {"ln": 0.0, "rms": 0.8, "none": 0.9}
    numbers = lambda cell: measurement({"mean": made[cell.arm], "mean_share": 0.5})  # noqa: E731
    assert drawing.draw(claim, results(claim, "cpu", numbers), tmp_path / "values.png")
    low, _ = drawn[0].axes[0].get_xlim()
    assert low <= 0.0  # of a number that is zero
    scattered = lambda cell: measurement({"mean": (0.2, 0.8)[cell.seed % 2], "mean_share": 0.5})  # noqa: E731
    assert drawing.draw(claim, results(claim, "cpu", scattered), tmp_path / "values.png")
    low, high = drawn[1].axes[0].get_xlim()
    middle = mean([0.2, 0.8, 0.2, 0.8, 0.2])
    assert low < (middle.lo or 0)
    assert high > (middle.hi or 1)  # the whole of the interval
    assert all(len(panel.get_xticks()) < 12 for panel in drawn[0].axes)


def test_a_mixed_figure_shows_slopes_and_who_trains(tmp_path: Path, drawn: list[Figure]) -> None:
    claim = CLAIMS["misinit-baselines"]
    assert drawing.draw(claim, results(claim, "cpu", by_theory(claim)), tmp_path / "figure.png")
    one, two, rows = drawn[0].axes
    assert one.get_title("left") == "Model update after 10 steps, decoder-only"
    assert two.get_title("left") == "Model update after 10 steps, encoder and decoder"
    assert [text.get_text().split(" (")[0] for text in one.get_legend().texts] == [
        "the paper's DeepNorm: slope 0.03",
        "MixLN's DeepNorm: slope 0.90",
        "Keel's DeepNorm: slope -0.01",
    ]
    inks = {line.get_color() for line in one.get_lines() if ": slope" in str(line.get_label())}
    assert len(inks) == 3  # one scheme with three sets of constants
    assert [label.get_text() for label in rows.get_yticklabels()] == [
        "the paper's DeepNorm, 24 blocks",
        "MixLN's DeepNorm, 2 blocks",
        "MixLN's DeepNorm, 6 blocks",
        "MixLN's DeepNorm, 24 blocks",
        "MixLN's DeepNorm, 24 blocks, lower rate",
        "Keel's DeepNorm, 24 blocks",
        "the paper's, with encoder, 18 blocks",
        "torchscale's, with encoder, 18 blocks",
        "the article's, with encoder, 18 blocks",
    ]


@pytest.mark.parametrize("part", ["slopes", "training"])
def test_a_mixed_figure_draws_the_part_that_there_is(part: str, tmp_path: Path, drawn: list[Figure]) -> None:
    claim = CLAIMS["depth-ablation"]

    def make(cell: Cell) -> RunRecord | None:
        return by_theory(claim)(cell) if claim.asks_training(cell.arm) == (part == "training") else None

    assert drawing.draw(claim, results(claim, "cpu", make), tmp_path / "figure.png")
    assert len(drawn[0].axes) == 1
