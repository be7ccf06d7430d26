"""The bench of the probes: ratios, verdicts and that it runs; its numbers are for people."""

import json
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import bench_probes
from tests.bench_probes import CELLS, MOST_BYTES, USUAL, Appended, Measured, Ratio, ratio
from tests.bench_probes_loops import bytes_held
from tests.bench_probes_told import processor, table

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
    monkeypatch.setattr(bench_probes, "appended", lambda: None)
    monkeypatch.setattr(bench_probes, "record", lambda *_: {})
    for name in ("lines_of", "table", "draw"):
        monkeypatch.setattr(bench_probes, name, lambda *_: [])
    monkeypatch.setattr(sys, "argv", ["bench_probes", "--cells", "d256,500", "--out", str(tmp_path)])
    bench_probes.main()
    assert taken == [("d256", 60), ("500", 20)]


def test_every_bound_of_the_project_has_a_cell():
    assert {cell.always for cell in CELLS.values() if cell.blocks == 100} == {1.01}
    assert CELLS["d256"].measured == CELLS["d256 compiled"].measured == 1.05
    for name in ("1000", "monitor 1000"):
        assert (CELLS[name].always, CELLS[name].most_bytes) == (1.02, MOST_BYTES)
    assert {CELLS[name].monitor for name in USUAL} == {False, True}


def test_rows_have_the_names_of_what_they_are():
    names = ["100", "100 x2", "100 compiled x2", "d256 compiled", "monitor 1000"]
    assert [CELLS[name].row for name in names] == [
        "100 blocks",
        "100 blocks, 2 processes",
        "100 blocks, 2 processes, compiled",
        "24 blocks, d=256, compiled",
        "Monitor, 1000 blocks",
    ]


def test_the_table_can_be_pasted_as_it_is():
    ratios = Ratio("always on", 1.002, 0.99, 1.008, 1.01), Ratio("measured step", 1.27, 1.2, 1.33, None)
    ratios = (*ratios, Ratio("measured every 50", 1.0054, 1.004, 1.0066, None))
    found = Measured(CELLS["monitor 1000"], 60, 2.0, 0.002, 0.7, 17_000_000, None, ratios)
    where = {"processor": "Some Processor", "cores": 2, "threads": 2, "gflops": 99, "date": "2026-01-02"}
    where |= {"torch": "2.13.0"}
    lines = table(where, [found], Appended(1000, 0.0004, 0.011, 25))
    assert lines[0] == "Some Processor, 2 cores, 2 threads, products at 99 GFLOP/s, 2026-01-02, torch 2.13.0:"
    assert lines[4] == (
        "| Monitor, 1000 blocks | 128 | 0.1 % | +0.2 % [-1.0, +0.8], met | +27.0 % [+20.0, +33.0] | +0.54 % | 35 % |"
        " 17.0 MB, missed |"
    )
    assert {line.count("|") for line in lines[2:5]} == {9}
    assert "takes 0.40 ms (bound 1 ms: met), all 25 of a measured step 11.0 ms" in lines[-1]


def test_the_processor_is_said_by_its_name(tmp_path: Path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some Processor @ 2 GHz\nmodel name\t: other\n")
    assert processor(tmp_path / "cpuinfo") == "Some Processor @ 2 GHz"
    assert processor(tmp_path / "nothing") == "an unknown processor"


def test_what_is_held_is_counted_once_and_without_the_model():
    model, shared = torch.nn.Linear(3, 3), torch.zeros(8, dtype=torch.float64)
    model(torch.ones(1, 3)).sum().backward()
    held = SimpleNamespace(a=[shared, shared[2:]], b={"w": model.weight, "g": model.weight.grad[0], "m": model})
    held.again, held.c = held, deque([np.zeros(5)])
    assert bytes_held([held], [model]) == 8 * 8 + 5 * 8


def test_it_runs_and_writes_what_it_found(tmp_path: Path):
    words = [sys.executable, "-m", "tests.bench_probes", "--cells", "smoke,monitor smoke", "--rounds", "2"]
    done = subprocess.run([*words, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "probes.json").read_text())
    assert written["machine"].keys() >= {"processor", "cores", "date", "torch"}
    assert written["machine"]["gflops"] > 0
    assert written["spool"]["record_s"] > 0
    for cell in written["cells"]:
        assert cell["rounds"] == 2
        assert {entry["what"] for entry in cell["ratios"]} == {"always on", "measured step", "measured every 50"}
        assert min(cell[name] for name in ("bare_s", "alone_s", "update_s", "held")) > 0
    assert [cell["cell"]["monitor"] for cell in written["cells"]] == [False, True]
    assert (tmp_path / "probes.png").stat().st_size > 5000
    for row in ("| 2 blocks, d=32 |", "| Monitor, 2 blocks, d=32 |"):
        assert row in done.stdout
