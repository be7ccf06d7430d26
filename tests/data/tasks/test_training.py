"""Every task trains a model of its topology, from the configuration to the records."""

import math

import pytest

from normscale.data.task import load_task
from normscale.tracking.reader import read_run
from normscale.train.run import run
from tests.data.made import TASKS, config_of


@pytest.mark.parametrize("name", TASKS)
def test_a_run_of_every_task(name, tmp_path):
    sections = {"probes": {"every": 2, "update": {"steps": [3], "sequences": 2}}}
    config = config_of(name, tmp_path, tracking={"runs": str(tmp_path / "runs")}, **sections)
    result = run(config)
    assert (result.outcome, result.exit_code) == ("finished", 0)
    record, task = read_run(result.run_dir), load_task(config)
    assert all(math.isfinite(value) for value in record.series["loss_train"].values)
    assert record.series["update"].values[-1] > 0
    assert record.start["data"].items() >= {"task": name, "vocab": task.vocab, "digest": task.digest}.items()
    assert result.summary["gap"] == pytest.approx(result.summary["unigram_nats"] - result.summary["loss_val"])


def test_segments_train(tmp_path):
    model = {"segments": 2, "positions": "learned", "embedding_norm": True}
    result = run(config_of("mlm", tmp_path, model=model, tracking={"runs": str(tmp_path / "runs")}))
    assert result.outcome == "finished"


def test_copying_is_learned_from_the_encoder(tmp_path):
    model = {"d": 32, "context": 8, "positions": "learned", "scheme": "pre"}
    train = {"steps": 110, "batch": 32, "eval_batches": 8, "optim": {"lr": 1e-2}, "schedule": {"warmup_steps": 10}}
    where = {"runs": str(tmp_path / "runs")}
    probes = {"profiles": False, "every": 100}
    result = run(
        config_of("copy", tmp_path, model=model, train=train, data={"symbols": 16}, tracking=where, probes=probes)
    )
    assert result.summary["unigram_nats"] == pytest.approx(math.log(16), abs=1e-5)
    assert result.summary["gap"] > 0.7  # 1.0 when this was written; the decoder's side alone cannot leave 0
