"""The life of a run: what it leaves, what it skips, and that bad input leaves nothing."""

import json
import math
from pathlib import Path

import pytest

from normscale.config.schema import RunConfig
from normscale.errors import ConfigError, DataError, StoreError
from normscale.tracking.reader import read_run
from normscale.tracking.spool import SpoolWriter
from normscale.train import run as run_module
from normscale.train.identity import run_id_of
from normscale.train.loop import Trainer
from normscale.train.run import run


def config(runs: Path, **parts: object) -> RunConfig:
    base: dict[str, object] = {
        "model": {"M": 2, "d": 16, "heads": 2, "context": 16},
        "data": {"max_bytes": 40_000},
        "train": {"steps": 6, "batch": 4, "eval_every": 3, "eval_batches": 2},
        "probes": {"every": 2, "update": {"steps": [1, 5], "sequences": 2}},
        "tracking": {"runs": str(runs)},
    }
    return RunConfig.model_validate(base | parts)


def test_a_run_leaves_its_records(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    result = run(config(tmp_path), on_step=lambda step, steps, loss: seen.append((step, steps)))
    assert (result.outcome, result.exit_code, result.skipped_existing) == ("finished", 0, False)
    assert seen == [(n, 6) for n in range(1, 7)]
    record = read_run(result.run_dir)
    assert record.finished
    assert record.series["loss_train"].steps == [1, 2, 4, 5, 6]  # 5: the update probe asked for it
    assert record.series["loss_val"].steps == [0, 3, 6]
    assert record.series["update"].steps == [1, 5]
    assert record.profiles["stream_rms"].data.shape == (5, 4)
    assert record.start["rows"][-1] == "decoder.0001.ffn"
    assert record.start["model"]["eps"] == [1e-5]
    assert record.start["precision_seen"]["compute"] == "float32"
    assert record.summary["gap"] == pytest.approx(record.series["loss_gap"].values[-1])
    assert record.summary["update@5"] == pytest.approx(record.series["update"].values[-1])
    assert record.summary["bad_step"] == -1
    assert json.loads((result.run_dir / "rank0.status").read_text()) == {"exit_code": 0, "outcome": "finished"}
    assert result.run_dir.name == result.run_id == run_id_of(config(tmp_path))


def test_finished_work_is_skipped_and_unfinished_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(step: int, steps: int, loss: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path), on_step=interrupt)
    first = run(config(tmp_path))
    record = read_run(first.run_dir)
    assert (record.attempt, record.end["outcome"]) == (2, "finished")  # type: ignore[index]
    monkeypatch.setattr(run_module, "build", lambda *a: pytest.fail("built a finished run"))
    again = run(config(tmp_path))
    assert again.skipped_existing
    assert again.summary == first.summary


def test_the_same_run_gives_the_same_bits(tmp_path: Path) -> None:
    one, other = (run(config(tmp_path / name, model={"M": 2, "d": 16, "heads": 2, "context": 16, "dropout": 0.1}))
                  for name in ("a", "b"))  # fmt: skip
    assert one.run_id == other.run_id
    values = [read_run(r.run_dir).series["loss_train"].values for r in (one, other)]
    assert values[0] == values[1]


def test_identity_follows_the_numbers_alone(tmp_path: Path) -> None:
    base = config(tmp_path)
    assert run_id_of(base) == run_id_of(base.model_copy(update={"name": "other"}))
    assert run_id_of(base) == run_id_of(config(tmp_path / "elsewhere"))
    for changed in ({"seed": 1}, {"precision": {"compute": "bf16"}}, {"data": {"max_bytes": 50_000}}):
        assert run_id_of(config(tmp_path, **changed)) != run_id_of(base)


def test_bf16_is_seen_in_products_and_the_stream_stays_fp32(tmp_path: Path) -> None:
    result = run(config(tmp_path, precision={"compute": "bf16"}))
    seen = read_run(result.run_dir).start["precision_seen"]
    assert (seen["compute"], seen["stream"], seen["params"]) == ("bfloat16", "float32", "float32")
    assert math.isfinite(result.summary["loss_val"])


@pytest.mark.parametrize(("policy", "outcome", "code", "steps"), [("stop", "nan", 3, 3), ("skip", "finished", 0, 6)])
def test_a_non_finite_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, outcome: str, code: int, steps: int
) -> None:
    original = Trainer.step

    def step(self, window, recorder):  # type: ignore[no-untyped-def]
        bias = self.engine.inner.sublayers()[1].branch.up.bias.data
        saved = bias.clone()
        if self.attempted == 2:
            bias[0] = math.inf
        result = original(self, window, recorder)
        if self.attempted == 3:
            bias.copy_(saved)
        return result

    monkeypatch.setattr(Trainer, "step", step)
    train = {"steps": 6, "batch": 4, "eval_batches": 2, "on_nonfinite": policy}
    result = run(config(tmp_path, train=train, probes={"every": 2}))
    assert (result.outcome, result.exit_code, result.summary["steps"]) == (outcome, code, steps)
    assert (result.summary["bad_step"], result.summary["skipped"]) == (3, 1)
    assert result.summary["bad_layer"] == 1  # the feed-forward of block 0, though every gradient was NaN
    record = read_run(result.run_dir)
    assert [(e["event"], e["layer"]) for e in record.events] == [("nonfinite", 1)]
    assert math.isnan(record.series["loss_train"].values[record.series["loss_train"].steps.index(3)])
    assert json.loads((result.run_dir / "rank0.status").read_text())["exit_code"] == code


def test_weights_wrecked_by_the_last_update_are_no_success(tmp_path: Path) -> None:
    train = {"steps": 1, "batch": 4, "eval_batches": 2, "optim": {"lr": 1e30}}
    result = run(config(tmp_path, train=train, probes={"every": 1}))
    assert (result.outcome, result.exit_code, result.summary["bad_step"]) == ("nan", 3, 1)


def test_the_identity_counts_options_as_they_are(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Depth is a number, and so is width. " * 2000)
    base = run_id_of(config(tmp_path))
    small = {"M": 2, "d": 16, "heads": 2, "context": 16}
    assert run_id_of(config(tmp_path, model=small | {"ffn": 64, "norm_options": {"bias": True}})) == base
    assert run_id_of(config(tmp_path, model=small | {"norm_options": {"bias": False}})) != base
    places = [run_id_of(config(tmp_path, data={"source": str(path)})) for path in (text, tmp_path / "." / "text.txt")]
    assert places[0] == places[1] != base


@pytest.mark.parametrize(
    ("parts", "error", "words"),
    [
        ({"model": {"scheme": "deepnrom"}}, ConfigError, "did you mean 'deepnorm'"),
        ({"data": {"source": "nowhere.txt"}}, DataError, "nowhere.txt"),
        ({"data": {"max_bytes": 30}}, DataError, "too short"),
    ],
)
def test_bad_input_leaves_nothing(tmp_path: Path, parts: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        run(config(tmp_path / "runs", **parts))
    assert not (tmp_path / "runs").exists()


def test_a_run_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / run_id_of(config(tmp_path))
    with SpoolWriter(folder, 1), pytest.raises(StoreError, match="another process"):
        run(config(tmp_path))
