"""The bench of steps compares what it says: the hand-written loop is our model, and missing packages leave rows out."""

import json
from pathlib import Path

import pytest
import torch

from tests import bench_step
from tests.bench_models import VOCAB, Case, hand_written, ours

SMALL = Case("small", blocks=2, d=32, heads=2, batch=2, context=16)


def test_the_hand_written_loop_trains_our_model() -> None:
    tokens = torch.randint(0, VOCAB, (SMALL.batch, SMALL.context + 1), generator=torch.Generator().manual_seed(1))
    own, other = ours(SMALL, False), hand_written(SMALL, False)
    for _ in range(5):
        batch = tokens[:, :-1], tokens[:, 1:]
        assert own(*batch) == pytest.approx(other(*batch), rel=1e-5)


def test_packages_that_are_missing_are_said_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "step.json"
    only = ("ours, eager", "hand-written, eager", "torchscale")
    words = ["--parts=smoke", "--compute=fp32", "--rounds=3", f"--json={path}", *(f"--only={name}" for name in only)]
    monkeypatch.setattr(bench_step, "_installed", lambda package: False)
    monkeypatch.setattr("sys.argv", ["bench_step", *words])
    bench_step.main()
    assert "torchscale not installed" in capsys.readouterr().out
    (part,) = json.loads(path.read_text())["parts"]
    assert [row["contender"] for row in part["rows"]] == list(only[:2])
    assert part["rows"][0]["ratio"] == 1
