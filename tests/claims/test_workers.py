import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from normscale.claims import workers
from normscale.claims.workers import Job, Pool, speed_of
from normscale.config.schema import RunConfig, TrackingConfig

FAKE = """
import os, signal, time
from pathlib import Path
from types import SimpleNamespace
from normscale.errors import StoreError
from normscale.tracking.files import try_lock


def run(config, on_step):
    folder = Path(config.tracking.runs)
    word, _, rest = config.name.partition(" ")
    with (folder / "log").open("a") as log:
        log.write(f"{config.name} {os.getpid()} {os.environ.get('OMP_NUM_THREADS')}\\n")
    if word == "fails":
        raise ValueError("of no use\\nwith a second line")
    if word == "dies" or (word == "dies-once" and not (folder / "died").exists()):
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "held":
        (folder / "held-run").mkdir(exist_ok=True)
        if (lock := try_lock(folder / "held-run" / ".lock")) is None:
            raise StoreError(f"{folder / 'held-run'}: another process is writing this run; wait for it")
        os.close(lock)
    for step in range(1, 11 if word != "sleeps" else 1000):
        on_step(step, 10 if word != "sleeps" else 1000, 1.0)
        time.sleep(0.05 if word == "sleeps" else 0.001)
    return SimpleNamespace(run_id=rest or "id")
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Pool]]:
    (tmp_path / "fake_train.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[Pool] = []

    def make(size: int) -> Pool:
        made.append(Pool(size, entry="fake_train:run"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def job(name: str, folder: Path, cost: float = 1.0) -> Job:
    return Job("id", name, RunConfig(name=name, tracking=TrackingConfig(runs=str(folder), uri=None)), cost)


def log(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "log").read_text().splitlines()]


def test_all_jobs_are_done_longest_first_on_single_threaded_workers(
    tmp_path: Path, pool: Callable[[int], Pool]
) -> None:
    jobs = [job("a", tmp_path, 1), job("b", tmp_path, 9), job("c", tmp_path, 5)]
    ended: list[str] = []
    pool(1).run(jobs, lambda one: ended.append(one.name) if one else None)
    assert [one.outcome for one in jobs] == ["done"] * 3
    assert [name for name, *_ in log(tmp_path)] == ended == ["b", "c", "a"]
    assert {threads for *_, threads in log(tmp_path)} == {"1"}
    assert all(one.step_s is not None and 0.0005 < one.step_s < 0.1 for one in jobs)
    assert all(one.core_s is not None and one.step_s and one.core_s < one.step_s / 2 for one in jobs)  # they sleep


def test_a_rank_comes_before_the_cost_and_after_the_time_nothing_begins(
    tmp_path: Path, pool: Callable[[int], Pool]
) -> None:
    jobs = [job("a", tmp_path, 1), job("b", tmp_path, 9), job("c", tmp_path, 5)]
    jobs[1].rank = 1
    one = pool(1)
    one.run(jobs)
    assert [name for name, *_ in log(tmp_path)] == ["c", "a", "b"]
    late = job("d", tmp_path)
    one.run([late], until=time.monotonic())
    assert (late.outcome, len(log(tmp_path))) == (None, 3)


def test_a_run_that_would_not_end_in_time_does_not_begin(tmp_path: Path, pool: Callable[[int], Pool]) -> None:
    jobs = [job("long", tmp_path, 300), job("a", tmp_path, 0.1), job("b", tmp_path, 0.1)]
    began = time.monotonic()
    pool(1).run(jobs, until=began + 200)
    assert [one.outcome for one in jobs] == [None, "done", "done"]
    assert time.monotonic() - began < 100  # nor is it waited for


def test_a_machine_slower_than_its_estimate_begins_less() -> None:
    jobs = [Job("", name, RunConfig(), 100) for name in "abc"]
    assert speed_of(jobs, 2, 0) == 1
    jobs[0].share = jobs[1].share = 0.5
    assert speed_of(jobs, 2, 200) == pytest.approx((15 + 100) / (15 + 400))


def test_two_workers_share_the_queue(tmp_path: Path, pool: Callable[[int], Pool]) -> None:
    jobs = [job("sleeps", tmp_path), job("a", tmp_path), job("b", tmp_path)]
    both = pool(2)

    def tell(_: Job | None) -> None:
        if jobs[1].outcome and jobs[2].outcome:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        both.run(jobs, tell)
    # Both short runs came to their end beside the long one, which takes a minute, and in another process.
    assert not jobs[0].outcome
    process = {name: number for name, number, _ in log(tmp_path)}
    assert process["a"] == process["b"] != process.get("sleeps")  # whose own start may be the slower one


def test_a_failed_run_is_not_tried_again_and_stops_no_other(tmp_path: Path, pool: Callable[[int], Pool]) -> None:
    jobs = [job("fails", tmp_path, 2), job("a", tmp_path)]
    pool(1).run(jobs)
    assert (jobs[0].outcome, jobs[0].note) == ("failed", "ValueError: of no use")
    assert jobs[1].outcome == "done"
    assert len(log(tmp_path)) == 2


def test_a_killed_worker_is_replaced_and_its_run_tried_once_more(tmp_path: Path, pool: Callable[[int], Pool]) -> None:
    jobs = [job("dies-once", tmp_path, 2), job("a", tmp_path)]
    pool(1).run(jobs)
    assert [one.outcome for one in jobs] == ["done", "done"]
    assert jobs[0].deaths == 1


def test_a_run_that_kills_two_workers_is_lost(tmp_path: Path, pool: Callable[[int], Pool]) -> None:
    jobs = [job("dies", tmp_path, 2), job("a", tmp_path)]
    pool(1).run(jobs)
    assert (jobs[0].outcome, jobs[1].outcome) == ("lost", "done")
    assert "exit status -9" in jobs[0].note
    assert [name for name, *_ in log(tmp_path)].count("dies") == 2


def test_a_run_that_another_process_holds_is_waited_for(
    tmp_path: Path, pool: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "HELD_S", 0.2)
    (tmp_path / "held-run").mkdir()
    lock = workers.try_lock(tmp_path / "held-run" / ".lock")
    assert lock is not None
    jobs = [job("held", tmp_path, 2), job("a", tmp_path)]

    def release() -> None:
        while not (tmp_path / "log").exists() or len(log(tmp_path)) < 3:
            time.sleep(0.05)
        os.close(lock)

    thread = threading.Thread(target=release, daemon=True)
    thread.start()
    ended: list[str] = []
    pool(1).run(jobs, lambda one: ended.append(one.name) if one else None)
    thread.join()
    assert ended == ["a", "held"]
    assert jobs[0].outcome == "done"


def test_close_ends_workers_in_the_middle_of_a_run(tmp_path: Path, pool: Callable[[int], Pool]) -> None:
    one = pool(1)
    sleeper = job("sleeps", tmp_path)

    def stop(_: Job | None) -> None:
        if sleeper.share > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.run([sleeper], stop)
    pid = one.pids[0]
    assert pid is not None
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < 3
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_ignores_ctrl_c_which_is_for_the_parent(tmp_path: Path, pool: Callable[[int], Pool]) -> None:
    one = pool(1)
    sent: list[bool] = []
    sleeper = job("sleeps", tmp_path)

    def interrupt(_: Job | None) -> None:
        if sleeper.share > 0 and not sent:
            os.kill(one.pids[0] or 0, signal.SIGINT)
            sent.append(True)
        elif sent and sleeper.share > 0.02:
            raise StopIteration

    with pytest.raises(StopIteration):
        one.run([sleeper], interrupt)
    assert sleeper.deaths == 0


def test_sources_that_changed_meanwhile_are_noticed(tmp_path: Path, pool: Callable[[int], Pool]) -> None:
    moved = job("a other-id", tmp_path)
    pool(1).run([moved])
    assert moved.outcome == "failed"
    assert "the sources changed meanwhile: it ran as other-id" in moved.note
