"""Two real ranks under DDP, whose optimizer has a parameter that DDP does not average: none decides alone."""

import json
from pathlib import Path

import pytest

from normscale.tracking.reader import read_run
from tests.integration.ranks import run_two
from tests.monitor.made import events


@pytest.mark.slow
def test_ranks_decide_together_where_ddp_does_not_make_gradients_alike(tmp_path: Path) -> None:
    run_two("alike_worker", str(tmp_path), package="tests.monitor")
    one, two = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert repr(one) == repr(two)  # NaN and all
    assert len(one) == 14
    for kind, (*steps, (scale, _), alike) in one.items():
        frozen, scaled = kind.startswith("frozen"), kind.startswith("scaled")
        assert alike == frozen, kind
        assert scale == (8.0 if scaled else 1.0), kind  # it has fallen, on both
        reason = "applied" if frozen else "loss scale overflow" if scaled else "non-finite gradient"
        assert [(applied, why) for applied, why, _ in steps] == [
            (True, "applied"),
            (True, "applied"),
            (frozen, reason),
            (True, "applied"),
        ], kind
        (run,) = (tmp_path / kind).iterdir()
        found = read_run(run)
        assert len(events(found, "nonfinite")) == (not frozen and not scaled), kind
        for event in events(found, "nonfinite"):
            assert [fault["kind"] for fault in event["parameters"]] == ["NaN"], kind  # which rank 0 does not have
