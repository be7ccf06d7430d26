"""A signal that takes the machine back: the step is finished, the state kept, and nothing is lost by it."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normscale.arguments import stoppable
from normscale.config.schema import RunConfig
from normscale.errors import RunFailed
from normscale.tracking.reader import read_run
from normscale.train import preempt
from normscale.train.checkpoint import steps_in
from normscale.train.preempt import Preempted, asked_to_end
from normscale.train.run import run
from tests.train.test_resume import check_records, config, end_state, resumed


def signalled(config: RunConfig, number: int, at: int = 4, again: Callable[[], None] = lambda: None) -> BaseException:
    """Trains, with a signal in the middle of step `at` + 1; returns what ended it."""

    def send(step: int, steps: int, loss: float) -> None:
        if step == at:
            signal.raise_signal(number)
            again()

    with pytest.raises(BaseException) as caught, stoppable():
        run(config, on_step=send)
    return caught.value


def told(run_dir: Path) -> list[str]:
    return [event["event"] for event in read_run(run_dir).events]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_was_taken_off_ends_as_the_one_that_was_not(number: int, tmp_path: Path) -> None:
    whole, parted = (config(tmp_path / name, every=100) for name in ("whole", "parted"))
    one = run(whole)
    error = signalled(parted, number)
    assert isinstance(error, Preempted)
    name = signal.Signals(number).name
    assert str(error) == f"stopped by {name} after step 4, with a checkpoint to go on from"
    assert error.exit_code == 143
    (run_dir,) = (tmp_path / "parted").iterdir()
    record = read_run(run_dir)
    assert record.end is not None
    assert (record.end["outcome"], record.end["exit_code"]) == ("interrupted", 143)
    assert [(event["step"], event["says"]) for event in record.events if event["event"] == "preempted"] == [
        (4, f"{name} ended it after step 4 of 9, with a checkpoint to go on from")
    ]
    assert steps_in(run_dir / "checkpoints") == [4]

    other, from_step = resumed(parted)
    assert from_step == 4
    (tensors, _), (others, _) = end_state(one.run_dir), end_state(other.run_dir)
    assert all(tensor.equal(others[name]) for name, tensor in tensors.items())
    record = read_run(other.run_dir)
    record.events = [event for event in record.events if event["event"] != "preempted"]
    check_records(read_run(one.run_dir), record)


def test_repeats_are_one_request_and_a_later_signal_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again() -> None:
        signal.raise_signal(signal.SIGTERM)

    assert isinstance(signalled(config(tmp_path / "agents"), signal.SIGTERM, again=again), Preempted)
    monkeypatch.setattr(preempt, "SAME_S", -1.0)
    error = signalled(config(tmp_path / "impatient", every=100), signal.SIGTERM, again=again)
    assert (type(error).__name__, str(error)) == ("Stopped", "stopped by SIGTERM")
    (run_dir,) = (tmp_path / "impatient").iterdir()
    assert steps_in(run_dir / "checkpoints") == []
    assert read_run(run_dir).end is not None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_without_checkpoints_it_ends_at_once(number: int, code: int, tmp_path: Path) -> None:
    error = signalled(config(tmp_path, every=0), number)
    assert (type(error).__name__, getattr(error, "exit_code", None)) == ("Stopped", code)
    (run_dir,) = tmp_path.iterdir()
    assert told(run_dir) == []
    record = read_run(run_dir)
    assert record.end is not None
    assert record.end["outcome"] == "interrupted"
    assert not (run_dir / "checkpoints").exists()


def test_a_signal_in_the_last_step_comes_too_late_to_matter(tmp_path: Path) -> None:
    def send(step: int, steps: int, loss: float) -> None:
        if step == steps:
            signal.raise_signal(signal.SIGTERM)

    with stoppable():
        result = run(config(tmp_path), on_step=send)
    assert (result.outcome, told(result.run_dir)) == ("finished", [])


def test_a_checkpoint_that_cannot_be_written_is_said_and_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("normscale.train.checkpoint.save_file", full)
    error = signalled(config(tmp_path, every=100), signal.SIGTERM)
    assert isinstance(error, RunFailed)
    assert str(error) == (
        "SIGTERM ended it after step 4 of 9, and its checkpoint could not be written (No space left on device); free"
        " some space, then the same command goes on from the newest that is there"
    )
    (run_dir,) = tmp_path.iterdir()
    assert told(run_dir) == ["checkpoint_failed", "preempted"]


def test_what_is_ignored_stays_so_but_for_the_signal_that_launchers_ignore_for_themselves() -> None:
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    seen: list[int] = []
    try:
        with stoppable(), asked_to_end(lambda: seen.append(1)) as asked:
            signal.raise_signal(signal.SIGTERM)
            assert not asked
            signal.raise_signal(signal.SIGUSR1)
            assert asked.number == signal.SIGUSR1
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_IGN] * 2
        assert seen == [1]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_the_workers_of_a_claim_die_of_it_as_they_did() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with asked_to_end(lambda: None):
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_mlflow_shows_it(tmp_path: Path) -> None:
    import mlflow

    from normscale.tracking.mlflow_sink import sync

    signalled(config(tmp_path / "runs", every=100), signal.SIGTERM)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert sync(tmp_path / "runs", uri).ok
    client = mlflow.MlflowClient(uri)
    (found,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert found.info.status == "KILLED"
    said = "preempted: SIGTERM ended it after step 4 of 9, with a checkpoint to go on from"
    assert said in found.data.tags["mlflow.note.content"]
