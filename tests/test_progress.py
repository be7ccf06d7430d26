"""What a person sees while a run goes on."""

import io

from normscale.progress import Doing, Progress, duration, figure


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drive(out: io.StringIO, steps: int, each_s: float) -> str:
    now = [0.0]
    progress = Progress(out, clock=lambda: now[0])
    for step in range(1, steps + 1):
        progress(step, steps, 3.0 - step / 1000)
        now[0] += each_s
    progress.end()
    return out.getvalue()


def test_a_log_gets_the_first_step_one_line_in_ten_seconds_and_the_last():
    lines = drive(io.StringIO(), 100, each_s=0.25).splitlines()
    assert lines == [
        "step 1/100  loss 2.999",
        "step 41/100  loss 2.959  250 ms/step  0:15 left",
        "step 81/100  loss 2.919  250 ms/step  0:05 left",
        "step 100/100  loss 2.900  250 ms/step  0:00 left",
    ]


def test_a_terminal_gets_one_rewritten_line():
    text = drive(Terminal(), 30, each_s=0.05)
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert text.rpartition("\r\x1b[K")[2] == "step 30/30  loss 2.970  50 ms/step  0:00 left\n"


def test_the_first_step_does_not_count_for_the_time_left():
    now = [0.0]
    out = io.StringIO()
    progress = Progress(out, clock=lambda: now[0])
    for step, at in ((1, 60.0), (2, 71.0)):
        now[0] = at
        progress(step, 12, 1.0)
    assert out.getvalue().splitlines()[-1].endswith("11000 ms/step  1:50 left")


def test_durations():
    assert [duration(value) for value in (0.4, 61, 3723, -1)] == ["0:00", "1:01", "1:02:03", "0:00"]


def work(out: io.StringIO) -> str:
    now = [0.0]
    with Doing(out, clock=lambda: now[0]) as say:
        for part in ("reading", "folding", "measuring"):
            say(part)
            now[0] += 7.0
    return out.getvalue()


def test_what_is_done_now_is_rewritten_and_taken_away_on_a_terminal() -> None:
    assert work(Terminal()).split("\r\x1b[K") == [
        "",
        "reading  0:00 gone",
        "folding  0:07 gone",
        "measuring  0:14 gone",
        "",
    ]


def test_what_is_done_now_is_a_line_in_ten_seconds_in_a_log() -> None:
    assert work(io.StringIO()) == "measuring  0:14 gone\n"


def test_a_figure_has_two_digits_and_no_power_of_ten():
    assert [figure(x) for x in (0.0268, 2.7, 9.96, 268.4, 27_000)] == ["0.027", "2.7", "10", "268", "27,000"]
