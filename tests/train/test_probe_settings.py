"""That a run does with its probes what its configuration says, and records what they measure and cost."""

import math
from pathlib import Path

import pytest

from normscale.probes.epsilon import COLUMNS
from normscale.tracking.reader import read_run, row_names
from normscale.train.loop import Trainer
from normscale.train.run import run
from tests.train.test_run import config


def test_the_probes_of_their_own_interval(tmp_path: Path) -> None:
    probes = {"every": 4, "update": {"every": 3}, "epsilon": {"every": 5, "rows": 8}, "layers": True}
    model = {"M": 2, "d": 16, "heads": 2, "context": 16, "scheme": "pre", "eps": 1e-8}
    result = run(config(tmp_path, model=model, probes=probes, precision={"compute": "fp16"}))
    record = read_run(result.run_dir)
    assert record.series["update"].steps == [3, 6]
    assert record.series["eps_change_max"].steps == record.profiles["adam_eps_share"].steps == [5, 6]
    names = [f"blocks.{block}.sublayers.{kind}.own.norm" for block in range(2) for kind in ("self", "ffn")]
    assert record.start["norms"] == [*names, "ends.norm"]
    for name in COLUMNS:
        assert record.profiles[name].data.shape == (2, 5)
        assert row_names(record, name) == record.start["norms"]
    assert record.start["eps_held"] == {"1e-08": 0.0}  # fp16 has no such number
    assert all(result.summary[f"{name}_probe_s"] > 0 for name in ("update", "epsilon", "adam", "layers"))
    assert [row["step"] for row in record.ledger] == list(range(1, 7))
    assert "update@6" in result.summary
    assert "update@3" not in result.summary
    assert not record.events


def test_what_probes_do_beside_training_is_not_in_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from normscale.probes.update import ModelUpdate

    original = ModelUpdate.after_step

    def slow(self: ModelUpdate, step: int) -> None:
        with self.stopwatch.timing(self.device):
            time.sleep(0.5)
        original(self, step)

    monkeypatch.setattr(ModelUpdate, "after_step", slow)
    summary = run(config(tmp_path, probes={"every": 1, "update": {"every": 1}})).summary
    assert summary["update_probe_s"] > 3
    assert summary["seconds"] > 3  # of the whole run
    assert summary["train_seconds"] < 2.5
    record = read_run(next(tmp_path.iterdir()))
    assert min(record.series["tokens_s"].values) > 64 / 0.4


def test_without_them_nothing_is_recorded_of_them(tmp_path: Path) -> None:
    record = read_run(run(config(tmp_path, probes={"every": 2})).run_dir)
    assert not {"norms", "profile_rows", "eps_held"} & record.start.keys()
    assert not any(name.startswith(("eps_", "adam_")) for name in (*record.profiles, *record.series))


def test_sgd_has_no_second_moments(tmp_path: Path) -> None:
    train = {"steps": 3, "batch": 4, "eval_batches": 1, "optim": {"name": "sgd", "lr": 0.1}}
    record = read_run(run(config(tmp_path, train=train, probes={"epsilon": {"every": 1}})).run_dir)
    assert "eps_up" in record.profiles
    assert "adam_eps_share" not in record.profiles
    assert not record.events


def test_what_a_spike_and_an_alarm_are_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Trainer] = []
    original = Trainer.step

    def step(self, window, recorder):  # type: ignore[no-untyped-def]
        seen.append(self)
        return original(self, window, recorder)

    monkeypatch.setattr(Trainer, "step", step)
    run(config(tmp_path, probes={"every": 2, "spikes": {"sigmas": 3.5, "window": 17}, "stalled": 2}))
    trainer = seen[0]
    for score in (trainer.spikes, trainer.grad_spikes):
        assert (score.sigmas, score.past.maxlen) == (3.5, 17)
    assert trainer.ledger.stalled == 2


def test_the_scores_and_the_alarm_come_out_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Trainer.step

    def step(self, window, recorder):  # type: ignore[no-untyped-def]
        inner = self.engine.inner
        self.engine.model = lambda tokens, to: inner(tokens, to) * (math.nan if self.attempted >= 3 else 1.0)
        return original(self, window, recorder)

    monkeypatch.setattr(Trainer, "step", step)
    train = {"steps": 6, "batch": 4, "eval_batches": 1, "on_nonfinite": "skip"}
    result = run(config(tmp_path, train=train, probes={"every": 5, "stalled": 3}))
    record = read_run(result.run_dir)
    (alarm,) = [event for event in record.events if event["event"] == "stalled"]
    assert (alarm["step"], alarm["in_a_row"], alarm["reasons"]) == (5, 3, "non-finite loss x3")
    assert "3 steps in a row were not applied" in capsys.readouterr().err
    assert (result.summary["spike"], result.summary["spike_grad"]) == (4 / 6, 4 / 6)
    assert [row["reason"] for row in record.ledger] == [None] * 2 + ["non-finite loss"] * 4
