"""What a start of a run tells of the attempt before it."""

import json
from pathlib import Path

import pytest

from normscale.tracking.reader import read_run
from normscale.tracking.spool import SPOOL
from normscale.train.lost import Roll
from normscale.train.run import _call_roll
from normscale.train.session import Session
from tests.probes.test_probes import Notes
from tests.train.test_resume import config, interrupted, resumed


def told(run_dir: Path) -> list[tuple[int, str, str]]:
    return [(event["step"], event["event"], event["says"]) for event in read_run(run_dir).events]


def test_each_start_says_how_the_one_before_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parted = config(tmp_path, every=4)
    interrupted(parted, at=5)
    (run_dir,) = tmp_path.iterdir()
    assert told(run_dir) == []

    spool = run_dir / SPOOL
    lines = spool.read_bytes().splitlines(keepends=True)
    assert json.loads(lines[-1])["kind"] == "end"
    spool.write_bytes(b"".join(lines[:-1]))  # as if it had been killed
    with monkeypatch.context() as patch:
        patch.setattr(Session, "evaluate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            resumed(parted)
    result, from_step = resumed(parted)
    assert from_step == 4
    why = "it was killed, its host was lost or its disk full"
    assert told(result.run_dir) == [
        (
            4,
            "resumed",
            f"attempt 2 goes on from step 4 with 1 rank; attempt 1 has no end in the records after step 4: {why}",
        ),
        (4, "resumed", "attempt 3 goes on from step 4 with 1 rank; attempt 2 failed after step 6 with exit code 1"),
    ]
    assert [event["reached"] for event in read_run(result.run_dir).events] == [4, 6]


def test_a_start_without_a_checkpoint_says_what_it_takes_the_place_of(tmp_path: Path) -> None:
    parted = config(tmp_path, every=0)
    interrupted(parted, at=5)
    result, _ = resumed(parted)
    said = "attempt 2 begins at step 0, for want of a checkpoint, with 1 rank; attempt 1 was stopped after step 4"
    assert told(result.run_dir) == [(0, "begun_anew", f"{said} with exit code 130")]


def test_a_lost_rank_is_recorded_though_its_name_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher ends a rank that still asks who is lost."""

    def stopped(roll: Roll) -> None:
        raise KeyboardInterrupt

    roll, notes = Roll(None, 0, ["node0", "node1"]), Notes()
    assert _call_roll(roll, 3, notes) is None  # type: ignore[arg-type]
    monkeypatch.setattr(Roll, "call", stopped)
    with pytest.raises(KeyboardInterrupt):
        _call_roll(roll, 4, notes)  # type: ignore[arg-type]
    lost = {"event": "rank_lost", "ranks": [], "says": "the connection to another rank broke"}
    assert notes.events == [{"step": 3, **lost}, {"step": 4, **lost}]
