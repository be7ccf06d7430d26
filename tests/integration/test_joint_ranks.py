"""Probes with passes of their own, on engines that gather weights: one that fails on a rank leaves no other waiting."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from normscale.tracking.reader import read_run
from tests.integration.ranks import run_two

without_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra 'deepspeed'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(420),  # ranks would wait for each other for longer
    pytest.mark.parametrize("engine", ["fsdp2", pytest.param("deepspeed:3", marks=without_deepspeed)]),
]

OFF = {
    "attach": "rank 1: attach: RuntimeError: before the pass",
    "due": "rank 1: due: RuntimeError: of one mind",
    "late": "rank 1: after_step: RuntimeError: after the pass",
    "alike": "rank 0: after_step: RuntimeError: amid the pass",
    "epsilon": "rank 1: after_step: RuntimeError: on purpose",
    "layers": "rank 1: after_step: RuntimeError: on purpose",
}


def test_training_goes_on_as_without_them(engine: str, tmp_path: Path) -> None:
    weights = []
    for case in ("without", "local"):
        (out := tmp_path / case).mkdir()
        run_two("joint_worker", str(out), engine, case, timeout=200)
        (run_dir,) = (out / "runs").iterdir()
        record = read_run(run_dir)
        weights += [json.loads((run_dir / f"rank{rank}.status").read_text())["weights"] for rank in range(2)]
        off = [torch.load(out / str(rank)) for rank in range(2)]
        assert off[0] == off[1] == (OFF if case == "local" else {})
        told = {event["probe"]: (event["step"], event["reason"]) for event in record.events}
        steps = {"attach": 1, "layers": 6}
        assert told == {name: (steps.get(name, 2), reason) for name, reason in off[0].items()}
        assert record.series["update"].steps == [3, 6]
        assert ("removal" in record.profiles) is (case == "without")
    assert len(set(weights)) == 1


def test_a_rank_that_fails_amid_a_pass_ends_all_at_once(engine: str, tmp_path: Path) -> None:
    errors = run_two("joint_worker", str(tmp_path), engine, "broken", timeout=200, code=1)
    said = (
        "normscale: the probe 'broken' failed on rank 1 in the middle of a pass that all ranks make together "
        "(RuntimeError: amid the pass); the others cannot go on without it: switch that probe off"
    )
    for error in errors:
        assert said in error.splitlines()
    (run_dir,) = (tmp_path / "runs").iterdir()
    (event,) = read_run(run_dir).events
    assert (event["event"], event["step"], f"normscale: {event['says']}") == ("pass_broken", 2, said)
