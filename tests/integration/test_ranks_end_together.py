"""Two real ranks that differ, are asked to end, or lose each other: both end, with one line, and nothing is lost.

The order matters: what one run leaves, the next one goes on from.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from normscale.tracking.reader import RunRecord, read_run
from normscale.train.checkpoint import steps_in

ROOT = Path(__file__).parents[2]
QUICK = str(ROOT / "configs/train/quick.yaml")
WORDS = ("model.M=2", "model.dropout=0.1", "data.max_bytes=40_000", "train.steps=150", "train.batch=4")
FEW = ("train.eval_batches=1", "probes.every=20", "checkpoint.every=1000", "tracking.uri=null", "engine.timeout_s=30")
TRAIN = [sys.executable, "-m", "normscale", "train", QUICK]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def start(runs: Path, *each: tuple[str, ...]) -> list[subprocess.Popen[str]]:
    """Starts a rank for each tuple of words."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    world = len(each)
    env = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    if world > 1:
        env |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [*TRAIN, *WORDS, *FEW, f"tracking.runs={runs}", *words],
            env=env | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, words in enumerate(each)
    ]


def end(started: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Returns the exit codes, and what was said of normscale on stderr."""
    try:
        said = [process.communicate(timeout=150)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    lines = [line for text in said for line in text.splitlines() if line.startswith("normscale:")]
    return [process.returncode for process in started], lines


def steps_of(runs: Path, least: int) -> Path:
    """Returns the folder of the run once it has recorded a step."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for spool in runs.glob("*/spool.jsonl"):
            if any(json.loads(line).get("step", 0) >= least for line in spool.read_text().splitlines()):
                return spool.parent
        time.sleep(0.05)
    raise AssertionError("the run did not get going")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def test_ranks_that_differ_train_nothing(folder: Path) -> None:
    codes, lines = end(start(folder / "unlike", (), ("seed=1",)))
    assert codes == [2, 2]
    host = socket.gethostname()
    assert lines == [
        f"normscale: seed: 1 on rank 1 on {host} and 0 on rank 0 on {host}; give every rank the same configuration"
    ]
    assert not (folder / "unlike").exists()


def test_a_mistake_on_one_host_ends_the_other(folder: Path) -> None:
    codes, lines = end(start(folder / "mistaken", (), ("model.scheme=deepnrom",)))
    assert codes == [2, 2]
    assert len(lines) == 1
    assert lines[0].startswith(f"normscale: rank 1 on {socket.gethostname()}: model.scheme: 'deepnrom'")


def test_a_signal_to_one_rank_ends_both_with_a_checkpoint(folder: Path) -> None:
    started = start(folder / "parted", (), ())
    run_dir = steps_of(folder / "parted", 20)
    started[1].send_signal(signal.SIGUSR1)
    codes, lines = end(started)
    assert codes == [143, 143]
    (step,) = steps_in(run_dir / "checkpoints")
    assert 20 <= step < 150
    assert lines == [
        f"normscale: stopped by a signal to another rank after step {step}, with a checkpoint to go on from"
    ]
    record = read_run(run_dir)
    assert record.end is not None
    assert (record.end["outcome"], record.end["exit_code"]) == ("interrupted", 143)
    assert [event["event"] for event in record.events if event["event"] == "preempted"] == ["preempted"]


def test_another_number_of_ranks_is_refused_with_both_numbers(folder: Path) -> None:
    (run_dir,) = (folder / "parted").iterdir()
    codes, lines = end(start(folder / "parted", ()))
    (step,) = steps_in(run_dir / "checkpoints")
    assert codes == [2]
    assert lines == [
        f"normscale: {run_dir}: 2 ranks began this run and left a checkpoint of step {step}, and this start has 1 rank;"
        " start 2 to go on with it, or give --fresh to train anew with 1"
    ]
    assert list((folder / "parted").iterdir()) == [run_dir]


def test_it_goes_on_to_the_very_end_it_would_have_come_to(folder: Path) -> None:
    assert end(start(folder / "parted", (), ()))[0] == [0, 0]
    assert end(start(folder / "whole", (), ()))[0] == [0, 0]
    parted, whole = (record_in(folder / name) for name in ("parted", "whole"))
    assert parted.start["from_step"] > 0
    assert whole.start["from_step"] == 0
    for name in ("loss_train", "loss_val", "grad_norm"):
        assert parted.series[name].steps == whole.series[name].steps
        np.testing.assert_array_equal(parted.series[name].values, whole.series[name].values, err_msg=name)
    statuses = [json.loads((parted.run_dir / f"rank{rank}.status").read_text()) for rank in range(2)]
    assert {(one["host"], one["world"], one["engine"]) for one in statuses} == {(socket.gethostname(), 2, "ddp")}
    ends = {json.loads((whole.run_dir / f"rank{rank}.status").read_text())["weights"] for rank in range(2)}
    assert {one["weights"] for one in statuses} == ends
    assert len(ends) == 1


def test_a_rank_that_is_lost_is_named(folder: Path) -> None:
    started = start(folder / "lost", (), ())
    run_dir = steps_of(folder / "lost", 20)
    started[1].kill()
    codes, lines = end(started)
    assert codes == [1, -signal.SIGKILL]
    said = f"rank 1 ({socket.gethostname()}) did not answer any more"
    assert lines == [f"normscale: lost the connection to another rank: {said}; the first rank that failed says why"]
    record = read_run(run_dir)
    assert record.end is not None
    assert (record.end["outcome"], record.end["exit_code"]) == ("error", 1)
    assert [event["says"] for event in record.events if event["event"] == "rank_lost"] == [said]


def record_in(runs: Path) -> RunRecord:
    (run_dir,) = runs.iterdir()
    return read_run(run_dir)
