from pathlib import Path

import pytest

from normscale.claims.manifest import cells_of, manifest_path, outcomes_of, results_of, write_manifest
from normscale.claims.verdict import judge
from normscale.errors import StoreError
from normscale.tracking.manifest import read_manifest
from tests.claims.synthetic import by_depth, record, results, write
from tests.claims.test_verdict import as_expected, depth_claim, slope_claim


def test_cells_come_back_as_they_were_written(tmp_path: Path) -> None:
    claim = depth_claim()
    cells = [(cell, f"run-{number}") for number, cell in enumerate(claim.cells("cpu"))]
    write_manifest(tmp_path, claim, "cpu", cells, {"run-0": "trained"})
    assert cells_of(tmp_path, "dies", "cpu") == cells
    assert cells_of(tmp_path, "dies", "gpu") == []
    read = read_manifest(manifest_path(tmp_path, "dies", "cpu"))
    assert (read.family, read.verdict, read.cells[0].outcome, read.cells[1].outcome) == ("depth", None, "trained", None)
    assert read.cells[0].name == "L0002 post s0"
    assert len({cell.cell for cell in read.cells}) == 8  # the seeds of a group share it, repeats have their own


def test_the_verdict_is_written_as_the_sink_reads_it(tmp_path: Path) -> None:
    claim = depth_claim()
    judgement = judge(claim, "cpu", results(claim, "cpu", as_expected))
    figure, report = tmp_path / "figure.png", tmp_path / "report.html"
    write_manifest(tmp_path, claim, "cpu", [], {}, judgement, [figure], report)
    read = read_manifest(manifest_path(tmp_path, "dies", "cpu"))
    assert read.verdict is not None
    assert read.verdict["verdict"] == "supported"
    assert (read.figures, read.report) == ((str(figure),), str(report))


def test_results_are_read_from_the_runs_folder_and_missing_ones_are_none(tmp_path: Path) -> None:
    claim = depth_claim()
    cells = [(cell, f"run-{number}") for number, cell in enumerate(claim.cells("cpu"))]
    write(tmp_path, "run-0", by_depth(cells[0][0]), {})
    found = results_of(tmp_path, cells)
    assert found[0].state.label == "trained"
    assert {result.state.label for result in found[1:]} == {"missing"}
    assert outcomes_of(claim, found, cells) == {"run-0": "trained"}


def test_records_that_cannot_be_read_are_missing_and_that_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = depth_claim()
    cells = [(cell, f"run-{number}") for number, cell in enumerate(claim.cells("cpu"))]
    write(tmp_path, "run-0", by_depth(cells[0][0]), {})
    (tmp_path / "run-1" / "spool.jsonl").mkdir(parents=True)
    for _ in range(2):
        assert [result.state.label for result in results_of(tmp_path, cells)][:3] == ["trained", "missing", "missing"]
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "run-1/spool.jsonl: cannot be read" in error
    assert error.endswith("it counts as missing\n")


def test_what_became_of_the_runs_in_the_sinks_words() -> None:
    claim = depth_claim()
    made = iter([record(0.8), record(0.0), record(0.15), record(0.0, outcome="nan"), record(0.0, outcome="error")])
    own = results(claim, "cpu", lambda cell: next(made, None))
    cells = [(result.cell, str(number)) for number, result in enumerate(own)]
    assert outcomes_of(claim, own, cells) == {"0": "trained", "1": "plateau", "2": "undecided", "3": "nan"}
    slopes = slope_claim("above", 0.25)
    short = results(slopes, "cpu", lambda cell: record(0.0, updates={10: 1.0}))
    assert set(outcomes_of(slopes, short, [(result.cell, "x") for result in short]).values()) == {"measured"}


def test_a_broken_manifest_and_an_unwritable_folder_are_one_line(tmp_path: Path) -> None:
    path = manifest_path(tmp_path, "dies", "cpu")
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(StoreError, match="is not a claim manifest"):
        cells_of(tmp_path, "dies", "cpu")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        write_manifest(tmp_path / "file", depth_claim(), "cpu", [], {})
