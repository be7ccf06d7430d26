from pathlib import Path

import pytest

from normscale.claims.claim import Cell
from normscale.claims.report import gather, publish, write_report
from normscale.claims.schemes.page import _risen
from normscale.claims.schemes.rates import Risen, risen, tolerated
from normscale.claims.schemes.records import Place, Ran
from normscale.tracking.reader import RunRecord
from tests.claims.schemes.test_records import WHERE, gathered
from tests.claims.synthetic import record
from tests.claims.test_figures import CLAIMS


def swept(failing: float, claim: str = "sweep") -> list[Ran]:
    sweep = CLAIMS["depth-lr-sensitivity"]

    def ran(cell: Cell, state: str) -> Ran:
        place = Place("pre", *WHERE, (64, 128, 64, 8, 1))
        return Ran(claim, sweep.labels[cell.arm], cell, place, state, 0.1, None, cell.name)

    cells = [cell for cell in sweep.cells("cpu") if cell.arm == "plain" and cell.depth == 6]
    return [ran(cell, "stuck" if cell.lr == failing and cell.seed == 1 else "trained") for cell in cells]


@pytest.mark.parametrize(("failing", "rate"), [(3e-3, 1e-3), (3e-4, None), (0.0, 3e-1)])
def test_the_largest_tolerable_rate_is_below_the_first_that_a_seed_fails_at(failing: float, rate: float | None) -> None:
    (found,) = tolerated(swept(failing), "pre")
    assert (found.rate, found.depth, len(found.swept)) == (rate, 6, 7)
    assert tolerated(swept(failing), "post") == []


def test_rates_that_rose_are_given_by_arm_and_depth_from_published_records_too(tmp_path: Path) -> None:
    claim = CLAIMS["depth-max-lr"]

    def made(cell: Cell) -> RunRecord:
        return record(gap=0.9, numbers={"rate_tolerated": 1e-3 * cell.depth + 1e-4 * cell.seed})

    here = gathered([(claim, made)], tmp_path / "runs")
    found = risen(here, "pre")
    assert [(one.label, one.depth, one.seeds, one.top) for one in found] == [
        ("Pre-Norm", 8, 3, 5e-2),
        ("Pre-Norm", 32, 3, 5e-2),
    ]
    assert [(one.low, one.high) for one in found] == [
        (pytest.approx(8e-3), pytest.approx(8.2e-3)),
        (pytest.approx(32e-3), pytest.approx(32.2e-3)),
    ]
    assert [one.label for one in risen(here, "deepnorm")] == ["DeepNorm"]  # not the arm with Keel's constants
    assert risen(gathered([(claim, made)], tmp_path / "smoke", "smoke"), "pre") == []
    publish(write_report(tmp_path / "runs", [claim], reports=tmp_path / "reports"), tmp_path / "published")
    assert risen(gather(tmp_path / "empty", [claim], published=tmp_path / "published"), "pre") == found


def test_a_rate_that_rose_is_said_with_its_seeds() -> None:
    said = _risen(Risen("depth-max-lr", "Keel", 32, 1.234e-2, 2e-2, 3, 5e-2))
    assert said.endswith("32 blocks, Keel: 0.0123 to 0.02 (3 seeds, of a rate that rose to 0.05, depth-max-lr)")
