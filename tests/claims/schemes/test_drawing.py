import math
import re

from normscale.claims.schemes.drawing import Curve, panel


def points(svg: str) -> list[list[tuple[str, float, float]]]:
    paths = re.findall(r'<path class="curve"[^>]* d="([^"]*)"', svg)
    found = [re.findall(r"([ML])([\d.]+) ([\d.]+)", path) for path in paths]
    return [[(pen, float(x), float(y)) for pen, x, y in path] for path in found]


def test_a_curve_runs_over_relative_depth_and_whole_decades() -> None:
    ((first, middle, last), (start, end)) = points(panel("title", [Curve("a", [1, 10, 100]), Curve("b", [100, 1])]))
    assert (first[1], last[1]) == (start[1], end[1])  # three sites and two take the same width
    assert middle[1] == (first[1] + last[1]) / 2
    assert first[2] - middle[2] == middle[2] - last[2] > 0  # decades are of one height, upwards
    assert (end[2], start[2]) == (first[2], last[2])


def test_what_is_not_finite_breaks_the_curve() -> None:
    ((*path,),) = points(panel("title", [Curve("a", [1.0, math.nan, 3.0, 0.0, 5.0, math.inf])]))
    assert [pen for pen, _, _ in path] == ["M", "M", "M"]
    assert "nothing finite" in panel("title", [Curve("a", [math.nan, 0.0])])


def test_labels_are_text() -> None:
    assert "<b>" not in panel("<b>", [Curve("<b>", [1.0])])
