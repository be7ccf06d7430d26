import time
from pathlib import Path

import pytest
import torch

from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.data.task import MicroBatch
from normscale.tracking.reader import read_run
from normscale.train import flops
from normscale.train.flops import Lengths, flops_per_step
from normscale.train.loop import Trainer
from normscale.train.meter import Meter
from normscale.train.run import run
from tests.train.test_run import config

CPU = torch.device("cpu")
CONFIG = revise(RunConfig(), {"model.M": 2, "model.d": 16, "model.heads": 2, "model.context": 12})


def micro_batch(sequences: int, length: int) -> MicroBatch:
    tokens = torch.zeros(sequences, length, dtype=torch.int64)
    return MicroBatch(tokens, tokens)


@pytest.fixture(autouse=True)
def _peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "gemm_rate", lambda device, compute, threads: 1e9)


def test_the_first_steps_do_not_count_once_there_are_others() -> None:
    own = Meter(CONFIG, 11, CPU, world=2)
    window = [micro_batch(2, 12), micro_batch(2, 12)]
    own.add(9.0, window, 90)
    assert own.summary()["tokens_s"] == pytest.approx(10)  # there is no other
    own.add(7.0, window, 90)
    for _ in range(4):
        own.add(0.5, window, 90)
    summary = own.summary()
    work = flops_per_step(CONFIG.model, 11, 8)  # two ranks with four sequences each
    assert (summary["train_seconds"], summary["tokens_s"]) == (pytest.approx(18), pytest.approx(180))
    assert summary["flops_per_step"] == work
    assert summary["tflops_s"] == pytest.approx(work / 0.5 / 1e12)
    assert (summary["mfu"], summary["peak_flops"]) == (pytest.approx(work / 0.5 / 2e9), 2e9)
    assert summary["peak_source"] == "measured GEMM"


def test_padding_and_short_sequences_count_as_they_are_computed() -> None:
    own = Meter(CONFIG, 11, CPU, world=1)
    own.add(1.0, [micro_batch(4, 5)], 3)
    assert own.summary()["flops_per_step"] == flops_per_step(CONFIG.model, 11, 4, Lengths(5))
    both = revise(CONFIG, {"model.N": 1})
    own = Meter(both, 11, CPU, world=1)
    source = torch.zeros(4, 9, dtype=torch.int64)
    own.add(1.0, [micro_batch(4, 5)._replace(source_BS=source)], 3)
    assert own.summary()["flops_per_step"] == flops_per_step(both.model, 11, 4, Lengths(5, 9))


def test_a_run_without_a_step_has_no_rates() -> None:
    assert set(Meter(CONFIG, 11, CPU, world=1).summary()) == {"peak_memory_bytes", "peak_memory_source"}


def test_the_peak_of_one_run_is_not_that_of_the_run_before() -> None:
    hog = bytearray(200_000_000)
    high = Meter(CONFIG, 11, CPU, world=1).summary()["peak_memory_bytes"]
    assert high > len(hog)
    del hog
    low = Meter(CONFIG, 11, CPU, world=1)
    if low.summary()["peak_memory_source"] == "resident, during the process":
        pytest.skip("this system does not let a process reset its peak")
    assert low.summary()["peak_memory_bytes"] < high - 150_000_000
    again = bytearray(200_000_000)
    assert low.summary()["peak_memory_bytes"] > len(again)


def test_a_peak_that_cannot_be_reset_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    summary = Meter(CONFIG, 11, CPU, world=1).summary()
    assert summary["peak_memory_source"] == "resident, during the process"
    assert summary["peak_memory_bytes"] > 50_000_000


def test_evaluations_slow_no_rate_and_the_record_has_the_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer.evaluate

    def evaluate(self, batches):  # type: ignore[no-untyped-def]
        time.sleep(0.4)
        return original(self, batches)

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    train = {"steps": 6, "batch": 4, "eval_every": 2, "eval_batches": 1}
    result = run(config(tmp_path, train=train))
    summary = read_run(result.run_dir).summary
    assert summary["seconds"] - summary["train_seconds"] > 3 * 0.4  # the last evaluation is after the last step
    assert 0 < summary["thread_s"] < summary["seconds"] - 3 * 0.4  # waiting takes no core
    assert summary["tokens_s"] > 1.2 * 6 * 4 * 16 / summary["seconds"]
    assert summary["flops_per_step"] == flops_per_step(config(tmp_path).model, 256, 4)
    assert summary["mfu"] == pytest.approx(summary["tflops_s"] * 1e12 / 1e9)
    assert summary["peak_memory_bytes"] > 0
    assert isinstance(summary["peak_source"], str)
