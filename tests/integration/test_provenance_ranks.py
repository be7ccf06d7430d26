"""A fault on the second rank alone: both name it, stop together, and say so with one exit code."""

import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from normscale.probes.culprit import Culprit
from normscale.tracking.reader import read_run
from tests.integration.ranks import run_two

DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra 'deepspeed'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "policy", "bad"),
    [
        ("ddp", "stop", [3]),
        ("ddp", "three", [3, 4, 5]),
        ("fsdp2", "three", [3, 4, 5]),
        pytest.param("deepspeed", "three", [3, 4, 5], marks=DEEPSPEED),
    ],
)
def test_both_ranks_stop_and_name_the_rank_and_the_micro_batch(
    tmp_path: Path, engine: str, policy: str, bad: list[int]
) -> None:
    errors = run_two("provenance_worker", str(tmp_path), policy, engine)
    assert [(tmp_path / f"code{rank}").read_text() for rank in range(2)] == ["3", "3"]
    (folder,) = (tmp_path / "runs").glob("*-*")
    record = read_run(folder)
    events = [event for event in record.events if event["event"] == "nonfinite"]
    assert [event["step"] for event in events] == bad
    culprits = [Culprit.from_fields(event["culprit"]) for event in events]
    for culprit in culprits:
        where = (culprit.micro_batch, culprit.phase, culprit.module, culprit.tensor)
        assert where == (2, "forward", "blocks.1.sublayers.ffn.branch", "output")
        assert (culprit.rank, culprit.host, culprit.device) == (1, socket.gethostname(), "cpu")
        assert culprit.reproduced
    assert [event["layer"] for event in events] == [3] * len(bad)
    assert [event["in_a_row"] for event in events] == list(range(1, len(bad) + 1))
    assert [entry["step"] for entry in events[0]["run_up"]] == [1, 2]
    assert record.summary["steps"] == bad[-1]
    for error in errors:
        assert culprits[0].sentence() in error
        assert f"stopped at step {bad[-1]}" in error
