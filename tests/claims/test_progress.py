import io
from itertools import pairwise

import pytest

from normscale.claims.progress import RunsProgress, time_left
from normscale.claims.workers import Job
from normscale.config.schema import RunConfig


def jobs(*costs: float) -> list[Job]:
    return [Job(f"id{number}", f"run {number}", RunConfig(), cost) for number, cost in enumerate(costs)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_is_that_of_the_work_or_of_the_longest_run() -> None:
    assert time_left(jobs(10, 10, 10, 10), 2) == 20
    assert time_left(jobs(30, 1, 1), 2) == 30
    assert time_left(jobs(10, 10), 2, speed=0.5) == 20
    assert time_left([], 2) == 0


def test_the_speed_seen_replaces_the_estimate_step_by_step() -> None:
    clock, own = Clock(), jobs(10, 10, 10, 10)
    progress = RunsProgress(own, 2, io.StringIO(), clock)
    assert "0/4 runs   0%  0:00 gone  0:20 left" in progress.line([])
    clock.now = 20  # twice as slow as estimated: 20 of 40 seconds of work in 20 seconds on two workers
    own[0].outcome, own[0].share, own[1].outcome, own[1].share = "done", 1.0, "lost", 1.0
    assert progress.line([own[2]]) == "2/4 runs  50%  0:20 gone  0:19 left  run 2 0%"


def test_the_time_left_does_not_jump() -> None:
    clock, own = Clock(), jobs(*[10] * 40)
    progress = RunsProgress(own, 2, io.StringIO(), clock)
    left = []
    for second in range(1, 300):  # half as quick as estimated
        clock.now = second
        for number, job in enumerate(own):
            job.share = min(1.0, max(0.0, second / 10 - number))
        minutes, seconds = progress.line([]).split("gone")[1].split()[0].split(":")
        left.append(60 * int(minutes) + int(seconds))
    assert max(abs(after - before) for before, after in pairwise(left)) < 15
    assert left[-1] == pytest.approx(101, abs=5)


def test_a_log_gets_a_line_every_ten_seconds_and_a_lost_run_at_once() -> None:
    out, clock, own = io.StringIO(), Clock(), jobs(10, 10)
    progress = RunsProgress(own, 1, out, clock)
    for second in range(1, 26):
        clock.now = second
        progress([])
    assert out.getvalue().count("\n") == 2
    own[0].outcome, own[0].note = "lost", "its worker died"
    progress([], own[0])
    assert out.getvalue().splitlines()[-1] == "run 0: lost: its worker died"


def test_a_terminal_gets_one_line_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "30")
    out, clock = Terminal(), Clock()
    progress = RunsProgress(jobs(10), 1, out, clock)
    clock.now = 1
    progress(jobs(10))
    progress.end()
    assert "\n" not in out.getvalue()
    assert out.getvalue().startswith("\r\x1b[K0/1 runs")
    assert len(out.getvalue().split("\x1b[K")[1].rstrip("\r")) == 29
