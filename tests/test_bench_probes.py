"""The bench of the probes: ratios, verdicts and that it runs; its numbers are for people."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import bench_probes
from tests.bench_probes import CELLS, Ratio, ratio

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.99, 1.01, "met"), (0.99, 1.0101, "not resolved"), (1.0101, 1.2, "missed"), (1.01, 1.2, "not resolved")],
)
def test_a_bound_is_met_missed_or_not_resolved(low: float, high: float, verdict: str):
    assert Ratio("x", 1.0, low, high, 1.01).verdict == verdict


def test_the_ratio_is_that_of_pairs():
    bare = [1.0, 10.0, 2.0, 4.0, 8.0]
    found = ratio("x", [1.1 * taken for taken in bare], bare, None)
    assert (found.median, found.low, found.high) == pytest.approx((1.1, 1.1, 1.1))


def test_a_cell_is_measured_as_often_as_it_says_whatever_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    taken = []
    monkeypatch.setattr(bench_probes, "measure", lambda cell, rounds: taken.append((cell.name, rounds)))
    monkeypatch.setattr(bench_probes, "show", lambda found: None)
    monkeypatch.setattr(bench_probes, "record", lambda found: {})
    monkeypatch.setattr(bench_probes, "draw", lambda found, path: None)
    monkeypatch.setattr(sys, "argv", ["bench_probes", "--cells", "d256,500", "--out", str(tmp_path)])
    bench_probes.main()
    assert taken == [("d256", 120), ("500", 20)]


def test_every_bound_of_the_project_has_a_cell():
    assert {cell.always for cell in CELLS.values() if cell.blocks == 100} == {1.01}
    assert CELLS["1000"].always == 1.02
    assert CELLS["d256"].measured == CELLS["d256 compiled"].measured == 1.05


def test_it_runs_and_writes_what_it_found(tmp_path: Path):
    words = [sys.executable, "-m", "tests.bench_probes", "--cells", "smoke", "--rounds", "5", "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads((tmp_path / "probes.json").read_text())["cells"]
    assert cell["rounds"] == 5
    assert {entry["what"] for entry in cell["ratios"]} == {"always on", "measured step", "measured every 50"}
    assert cell["bare_s"] > 0 < cell["alone_s"]
    assert (tmp_path / "probes.png").stat().st_size > 5000
