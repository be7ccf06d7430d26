"""Two real processes against one: the same numbers, one run, one voice."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from normscale.config.load import load
from normscale.tracking.reader import RunRecord, read_run
from normscale.train.run import run

ROOT = Path(__file__).parents[2]
WORDS = (
    "model.M=3",
    "data.max_bytes=60_000",
    "train.steps=10",
    "train.batch=8",
    "train.eval_batches=2",
    "train.optim.clip=0.5",
    "train.schedule.warmup_steps=10",
    "probes.every=2",
    "tracking.uri=null",
)


@pytest.fixture(scope="module")
def outer(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Returns a store, and a run of somebody else's in it that is active around the ranks."""
    import mlflow

    uri = f"sqlite:///{tmp_path_factory.mktemp('outer')}/mlflow.db"
    client = mlflow.MlflowClient(uri)
    return uri, client.create_run(client.create_experiment("theirs")).info.run_id


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory, outer: tuple[str, str]) -> tuple[RunRecord, RunRecord]:
    folder = tmp_path_factory.mktemp("ranks")
    quick = ROOT / "configs/train/quick.yaml"
    one = run(load(quick, [*WORDS, f"tracking.runs={folder / 'one'}"]))
    words = [str(quick), *WORDS, "train.accumulate=2", f"tracking.runs={folder / 'two'}"]
    launched = subprocess.run(
        [sys.executable, "-m", "launch", "local", "--nproc", "2", "--device", "cpu", "--", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_RUN_ID": outer[1]},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert launched.returncode == 0, launched.stderr
    folders = list((folder / "two").glob("deepnorm-*"))
    assert len(folders) == 1  # both ranks give the run one name
    assert sorted(path.name for path in folders[0].glob("rank*.status")) == ["rank0.status", "rank1.status"]
    assert launched.stdout.count("finished") == 1
    return read_run(one.run_dir), read_run(folders[0])


@pytest.mark.slow
def test_every_recorded_number_agrees(records: tuple[RunRecord, RunRecord]) -> None:
    one, two = records
    assert (two.start["identity"]["world"], two.start["engine"]) == (2, "ddp")
    assert set(one.series) == set(two.series)
    # What is sampled is of other positions where a micro-batch is another.
    for name in set(one.series) - {"tokens_s", "attn_logit_max", "attn_entropy_min"}:
        least = 1e-6 if name in ("stream_growth", "grad_slope_now") else 0.0  # slopes near 0 are of rounding
        np.testing.assert_allclose(two.series[name].values, one.series[name].values, 1e-5, least, err_msg=name)
    assert set(one.profiles) == set(two.profiles)
    for name in set(one.profiles) - {"attn_logit_max", "attn_entropy", "angle_online"}:
        profile = one.profiles[name]
        np.testing.assert_allclose(two.profiles[name].data, profile.data, rtol=1e-4, atol=1e-7, err_msg=name)
    losses = one.series["loss_val"].values
    assert losses[-1] < losses[0] - 0.1  # it does train


@pytest.mark.slow
def test_accumulation_and_ranks_do_not_hurry_the_schedule(records: tuple[RunRecord, RunRecord]) -> None:
    rates = records[1].series["lr"]
    assert rates.values[rates.steps.index(8)] == pytest.approx(0.8 * rates.values[-1])


@pytest.mark.slow
def test_two_ranks_are_one_run_in_mlflow_within_the_one_around_them(
    records: tuple[RunRecord, RunRecord], outer: tuple[str, str]
) -> None:
    import mlflow

    from normscale.tracking.mlflow_sink import sync

    two, (uri, around) = records[1], outer
    assert sync(two.run_dir.parent, uri).ok
    client = mlflow.MlflowClient(uri)
    found = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    (own,) = [run for run in found if run.info.run_id != around]
    assert own.data.tags["normscale.run"] == two.run_id
    assert own.data.tags["mlflow.parentRunId"] == around
    assert two.start["hosts"] == [socket.gethostname()] * 2
