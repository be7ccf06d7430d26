"""Two real ranks of an engine that shards, where the replay is refused: neither leaves it alone."""

import json
from pathlib import Path

import pytest

from normscale.tracking.reader import read_run
from tests.integration.ranks import run_two


@pytest.mark.slow
def test_both_ranks_leave_a_refused_replay_together(tmp_path: Path) -> None:
    run_two("reentrant_worker", str(tmp_path), package="tests.monitor")
    one, two = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert one == two
    assert [applied for applied, _ in one] == [True, True, False, True, False, True]
    culprits = [culprit for _, culprit in one]
    assert (culprits[2]["phase"], culprits[2]["rank"], culprits[2]["reproduced"]) == ("data", 0, True)
    assert not culprits[4]["reproduced"]
    (run,) = (tmp_path / "runs").iterdir()
    first, second = (event for event in read_run(run).events if event["event"] == "nonfinite")
    assert "replay_refused" not in first  # rank 0, which writes, knows from its loss
    assert "use_reentrant=False" in second["replay_refused"]
