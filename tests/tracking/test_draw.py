import io
import math
from itertools import pairwise

import numpy as np
import pytest

from normscale.tracking.draw import Look, Plot, log_span, look_of, resampled, span_of, sparkline

ASCII = Look(unicode=False)


def test_a_sparkline_goes_from_the_lowest_to_the_highest_bar() -> None:
    assert sparkline(range(8), Look(), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(range(8), ASCII, 8) == "_.-:=+*#"
    assert sparkline([1, math.nan, 2, math.inf], Look(), 4) == "▁×█×"
    assert sparkline([3, 3], Look(), 2) == "▅▅"
    assert sparkline([math.nan], ASCII, 3) == "xxx"
    assert sparkline([], Look(), 5) == ""
    assert sparkline([0, 1], Look(), 2, span=(0, 2)) == "▁▅"
    assert sparkline([-5, 9], Look(), 2, span=(0, 2)) == "▁█"


def test_no_number_is_too_large_to_be_drawn() -> None:
    assert sparkline([-1e308, 1e308], Look(), 2) == "▁█"
    assert sparkline([1e308], Look(), 1, span=(0, 1e-5)) == "█"
    for span in ((0, 1e-5), (-1e308, 1e308), (1e308, 1e308)):
        plot = Plot(ASCII, 4, (0, 10), span)
        plot.curve([(0, 1e308), (10, -1e308)])
        plot.marks([(5, 1e308)], "x")
        assert len(plot.lines()) == 6


def test_many_values_are_averaged_and_few_are_repeated() -> None:
    assert resampled(np.arange(1000), 10).tolist() == pytest.approx([49.5 + 100 * i for i in range(10)])
    assert resampled([1, 2, 3], 6).tolist() == [1, 1, 2, 2, 3, 3]
    assert resampled([1, math.nan, 3, 5], 2).tolist() == [1, 4]  # a mean of what is finite
    assert math.isnan(resampled([math.nan, math.nan, 3, 5], 2)[0])
    assert resampled([], 4).size == 0


def test_spans_leave_out_what_is_not_finite() -> None:
    assert span_of([1, math.nan], [math.inf, -2]) == (-2, 1)
    assert all(map(math.isnan, span_of([math.nan], [])))
    assert [log_span(*span) for span in ((1, 11), (1, 10), (-1, 50), (0, 5), (math.nan, math.nan))] == [
        True, False, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("look", [Look(width=40), Look(width=40, unicode=False)])
def test_a_plot_falls_where_its_curve_falls(look: Look) -> None:
    plot = Plot(look, 5, (0, 10), (1, 6))
    plot.curve([(x, 6 - x / 2) for x in range(11)])
    plot.level(1, "floor")
    lines = plot.lines()
    drawn = [[i for i, letter in enumerate(line[10:]) if letter == "*" or letter >= "\u2801"] for line in lines[:5]]
    assert all(max(above) <= min(below) + 1 for above, below in pairwise(drawn) if above and below)
    assert lines[0].startswith("       6 ")
    assert lines[4].startswith("   floor ")
    assert lines[-1].split() == ["step", "0", "10"]
    assert max(map(len, lines)) <= 40


def test_a_curve_breaks_where_it_is_not_finite_and_stays_inside() -> None:
    plot = Plot(Look(width=40, unicode=False), 3, (0, 4), (0, 1))
    plot.curve([(0, 0.5), (1, math.nan), (2, math.inf), (3, 1e9), (4, -1e9)])
    plot.marks([(1, math.nan), (2, 0.5)], "o")
    lines = plot.lines()
    assert lines[1][10] == "*"  # a point alone
    assert "*" not in lines[1][11:20]
    assert lines[1].count("o") == 1
    Plot(Look(), 3, (1, 1), (2, 2)).lines()  # neither axis has a length


class Stream(io.StringIO):
    def __init__(self, encoding: str | None, terminal: bool) -> None:
        super().__init__()
        self._encoding, self._terminal = encoding, terminal

    @property
    def encoding(self) -> str | None:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal


def test_the_look_is_what_the_stream_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    colourful = {"TERM": "xterm"}
    assert look_of(Stream("utf-8", False), colourful) == Look(100, True, False)
    assert look_of(Stream("UTF8", True), colourful) == Look(70, True, True)
    assert look_of(Stream("UTF_8", True), colourful | {"NO_COLOR": "1"}) == Look(70, True, False)
    assert look_of(Stream("ANSI_X3.4-1968", True), {"TERM": "dumb"}) == Look(70, False, False)
    assert look_of(Stream(None, False), {}) == Look(100, False, False)
    monkeypatch.setenv("COLUMNS", "500")
    assert look_of(Stream("utf-8", True), {}).width == 100
    monkeypatch.setenv("COLUMNS", "5")
    assert look_of(Stream("utf-8", True), {}).width == 40


def test_a_line_is_cut_and_made_ascii_where_it_must_be() -> None:
    assert Look(10).fit("x" * 11) == "x" * 9 + "…"
    assert Look(10, unicode=False).fit("é" * 9) == "\\xe9\\xe..."
    assert Look(10).fit("short") == "short"
