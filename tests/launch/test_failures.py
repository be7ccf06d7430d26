"""Which failure is the reason."""

import json
from pathlib import Path

import pytest

from launch.failures import Failure, could_not_tell, first_failure, first_of, of_exit
from normscale.arguments import LOST_RANK


def status(folder: Path, rank: int, code: int, error: str, t: int) -> None:
    text = json.dumps({"rank": rank, "exit_code": code, "error": error, "t": t})
    (folder / f"rank{rank}.status").write_text(text)


def test_the_earliest_failure_counts_not_the_lowest_rank(tmp_path: Path):
    for rank, code, t in ((0, 1, 300), (1, 3, 200), (2, 0, 100)):
        status(tmp_path, rank, code, f"e{rank}", t)
    assert first_failure(tmp_path) == Failure(1, 3, "e1")


def test_what_all_ranks_met_is_rank_0_s_to_say(tmp_path: Path):
    for rank, t in ((0, 300), (1, 200)):
        status(tmp_path, rank, 2, "same", t)
    assert first_failure(tmp_path) == Failure(0, 2, "same")


def test_why_a_rank_could_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert could_not_tell(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    assert could_not_tell(tmp_path / "gone") == "No such file or directory"
    (tmp_path / "rank3.part").touch()
    assert could_not_tell(tmp_path) == "no space was left"


@pytest.mark.parametrize(
    ("later", "earlier"),
    [
        (Failure(1, 1, "disk full", t=9), Failure(0, 1, f"{LOST_RANK}; ...", t=3)),
        (Failure(1, 1, "disk full", t=9), Failure(0, 143, "stopped by SIGTERM", t=3)),
        (of_exit(1, -9), Failure(0, 1, "the 0th step failed", t=3)),
    ],
    ids=["lost", "stopped", "killed"],
)
def test_what_follows_from_another_failure_is_not_the_reason(later: Failure, earlier: Failure):
    assert first_of([earlier, later]) == later
    assert first_of([]) is None


def test_how_a_failure_reads():
    assert of_exit(3, -9).at("n1").says() == (
        "rank 3 on n1 was killed by SIGKILL (out of memory?); the other ranks were stopped"
    )
    assert of_exit(3, 5).says() == "rank 3 ended with exit code 5; the other ranks were stopped"
    assert Failure(3, 1, "disk full", t=5).at("n1").says() == "rank 3 on n1: disk full"
