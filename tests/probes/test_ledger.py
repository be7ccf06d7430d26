"""The step ledger: why steps were not applied, and whether all who count them agree."""

import json
import math
from typing import Any

import pytest
import torch

from normscale.probes.ledger import (
    SAMPLE,
    Entry,
    Ledger,
    Tally,
    disagreements,
    in_runs,
    reason_of,
    resolved_norm,
    spread_over_entries,
)
from normscale.probes.probe import collect
from tests.probes.test_probes import Notes, windows
from tests.train.test_loop import poisoned, trainer


@pytest.mark.parametrize(
    ("raw", "applied", "previous", "norm"),
    [
        (0.5, True, 0.7, 0.5),
        (0.5, True, 0.5, 0.5),  # two steps may have one norm
        (0.5, False, 0.7, 0.5),  # skipped for another reason, with a norm of its own
        (0.5, False, 0.5, None),  # the number of the step before, kept
        (0.5, False, None, 0.5),
        (0.0, True, 0.0, 0.0),
        (-1, False, 0.5, math.nan),  # NaN and Inf masked to -1
        (-1.0, True, 0.5, math.nan),
        (-1, False, -1, math.nan),
        (math.inf, False, 0.5, math.inf),
        (math.inf, False, math.inf, math.inf),
        (math.nan, False, 0.5, math.nan),
        (None, True, 0.5, None),
        (None, False, None, None),
        (torch.tensor(0.25), True, None, 0.25),
        ("", True, None, None),
        (False, True, None, None),
    ],
)
def test_what_engines_say_where_they_have_nothing_to_say(
    raw: Any, applied: bool, previous: Any, norm: float | None
) -> None:
    found = resolved_norm(raw, applied, previous)
    assert (found is None) if norm is None else found == pytest.approx(norm, nan_ok=True)


def test_why_a_step_was_not_applied() -> None:
    never = lambda: pytest.fail("the gradient was read")  # noqa: E731
    assert reason_of(math.nan, never) == "non-finite loss"
    assert reason_of(math.nan, never, absorbed=True) == "loss scale overflow"
    assert reason_of(1.0, lambda: False) == "non-finite gradient"
    assert reason_of(1.0, lambda: True) == "norm overflow"


def entry(step: int, reason: str | None = None, lr: float = 0.1, norm: float = 2.0) -> Entry:
    return Entry(step, reason, lr, norm, norm if reason is None else None)


def test_steps_that_are_not_applied_in_a_row_raise_one_alarm() -> None:
    ledger = Ledger(stalled=3)
    bad = ["norm overflow", "norm overflow", "non-finite loss", "non-finite loss"]
    told = [ledger.add(entry(i + 1, reason)) for i, reason in enumerate([*bad, None, *bad[:2], None, *bad[:3]])]
    alarm = [("stalled", {"in_a_row": 3, "reasons": "norm overflow x2, non-finite loss"})]
    assert told == [[], [], alarm, [], [], [], [], [], [], [], alarm]
    assert (ledger.in_a_row, ledger.applied) == (3, 2)


def test_it_goes_on_in_the_middle_of_a_row() -> None:
    first, second = Ledger(stalled=3), Ledger(stalled=3)
    for i in range(2):
        first.add(entry(i + 1, "non-finite loss", norm=math.nan))
    from normscale.train.checkpoint import _number, _strict

    second.load_state_dict(json.loads(json.dumps(_strict(first.state_dict())), object_hook=_number))
    assert second.add(entry(3, "norm overflow"))[0][1]["reasons"] == "non-finite loss x2, norm overflow"
    rows = second.flush()
    assert [row["step"] for row in rows] == [1, 2, 3]  # those that were not written yet
    assert math.isnan(rows[0]["norm"])
    assert second.flush() == []


def test_reasons_are_counted_in_order() -> None:
    assert in_runs(["a", "a", "b", "a"]) == "a x2, b, a"
    assert in_runs([]) == ""


@pytest.mark.parametrize(
    ("made", "counts", "says"),
    [
        (entry(3), Tally(3, 3.0, 0.1, 0.1, 0.9), []),
        (entry(3), Tally(3), []),  # of an engine that tells nothing
        (entry(3), Tally(3, 4.0), ["the optimizer counts 4 steps, 3 were applied"]),
        (entry(3), Tally(3, 3.0, 0.1, 0.2), ["the learning rate is 0.1, the schedule has 0.2 for applied step 3"]),
        (entry(3), Tally(3, changed=0.0), ["the step was applied, but no parameter changed (an update below their "
                                            "rounding changes nothing)"]),
        (entry(3, lr=0.0), Tally(3, changed=0.0), []),  # nothing was to change
        (entry(3, norm=0.0), Tally(3, changed=0.0), []),
        (entry(3, "non-finite loss"), Tally(2, changed=0.0), []),
        (entry(3, "non-finite loss"), Tally(2, changed=0.5), ["the step was not applied (non-finite loss), but 50.00% "
                                                               "of the parameters changed"]),
    ],
)  # fmt: skip
def test_what_does_not_agree_is_said(made: Entry, counts: Tally, says: list[str]) -> None:
    assert disagreements(made, counts) == says


def test_places_are_of_parameters_and_evenly_spread() -> None:
    spans = [(0, 5), (16, 20), (32, 62)]
    entries = [*range(5), *range(16, 20), *range(32, 62)]
    assert spread_over_entries(spans, 100).tolist() == entries
    some = spread_over_entries(spans, 13).tolist()
    assert some == [entries[i * 39 // 13] for i in range(13)]
    assert SAMPLE == 2**14


def ran(steps: int, bad: dict[int, float], every: int = 1, **train: Any) -> tuple[Any, Notes]:
    t, notes = trainer(every=every, **train), Notes()
    poisoned(t, lambda step: bad.get(step, 1.0))
    for window in windows(steps):
        t.step(window, notes)
    return t, notes


def test_every_attempted_step_is_in_it() -> None:
    t, notes = ran(6, {2: math.nan, 5: math.inf}, every=4, optim={"clip": 0.1}, schedule={"warmup_steps": 4})
    assert [row["step"] for row in notes.rows] == [1, 2, 3, 4, 5]  # 6 waits for the next record
    assert [row["reason"] for row in notes.rows] == [None, "non-finite loss", None, None, "non-finite loss"]
    assert [row["lr"] for row in notes.rows] == pytest.approx([2.5e-4, 5e-4, 5e-4, 7.5e-4, 1e-3])  # of applied steps
    assert notes.rows[0]["norm"] == notes.values[1]["grad_norm"]
    assert notes.rows[0]["norm_clipped"] == pytest.approx(0.1, rel=1e-4)
    assert math.isnan(notes.rows[1]["norm"])  # type: ignore[arg-type]
    assert notes.rows[1]["norm_clipped"] is None
    assert {row["scale_before"] for row in notes.rows} == {None}
    assert [event["event"] for event in notes.events] == ["nonfinite", "nonfinite"]
    assert t.ledger.pending[0].step == 6


def test_a_norm_overflow_and_a_bad_gradient_are_told_apart() -> None:
    t, notes = trainer(), Notes()
    value = [1e20]
    t.engine.inner.token.register_hook(lambda g: torch.full_like(g, value[0]))
    t.step(windows(1)[0], notes)
    value[0] = math.inf
    t.step(windows(1)[0], notes)
    assert [row["reason"] for row in notes.rows] == ["norm overflow", "non-finite gradient"]


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_an_alarm_in_any_precision(compute: str, capsys: pytest.CaptureFixture[str]) -> None:
    from normscale.config.schema import RunConfig
    from normscale.models.builder import build
    from normscale.train.engines.plain import PlainEngine
    from normscale.train.loop import Trainer
    from tests.probes.test_probes import MODEL

    config = RunConfig(
        model=MODEL, train={"steps": 9, "batch": 4}, probes={"stalled": 3}, precision={"compute": compute}
    )
    t, notes = (
        Trainer(PlainEngine(build(config.model, 32, 0), config.precision, torch.device("cpu")), config, []),
        Notes(),
    )
    poisoned(t, lambda step: math.nan if 2 <= step <= 6 else 1.0)
    for window in windows(8):
        t.step(window, notes)
    alarms = [event for event in notes.events if event["event"] == "stalled"]
    assert alarms == [{"step": 4, "event": "stalled", "in_a_row": 3, "reasons": "non-finite loss x3"}]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("normscale: step 4: 3 steps in a row were not applied (non-finite loss x3)")


def test_the_loss_scale_before_and_after_is_in_it() -> None:
    from normscale.config.schema import RunConfig
    from normscale.models.builder import build
    from normscale.train.engines.plain import PlainEngine
    from normscale.train.loop import Trainer
    from tests.probes.test_probes import MODEL

    scale = {"initial": 2.0**20, "growth_steps": 2}
    config = RunConfig(
        model=MODEL,
        train={"steps": 9, "batch": 4},
        probes={"every": 9},
        precision={"compute": "fp16", "loss_scale": scale},
    )
    t, notes = (
        Trainer(PlainEngine(build(config.model, 32, 0), config.precision, torch.device("cpu")), config, []),
        Notes(),
    )
    for window in windows(9):
        t.step(window, notes)
    overflows = [row for row in notes.rows if row["reason"] == "loss scale overflow"]
    assert overflows
    assert all(row["scale_after"] == row["scale_before"] / 2 for row in overflows)  # type: ignore[operator]
    assert any(row["scale_after"] == 2 * row["scale_before"] for row in notes.rows)  # type: ignore[operator]
    assert [row["step"] for row in notes.rows] == list(range(1, 10))


def test_an_optimizer_that_steps_where_none_was_applied_is_told() -> None:
    t, notes = trainer(), Notes()
    step = t.optimizer.step
    for i, window in enumerate(windows(4)):
        if i == 2:
            t.optimizer.step = lambda: (step(), step())  # type: ignore[method-assign,assignment]
        t.step(window, notes)
        t.optimizer.step = step  # type: ignore[method-assign]
    told = [(event["step"], event["says"]) for event in notes.events if event["event"] == "ledger"]
    assert told == [(n, f"the optimizer counts {n + 1} steps, {n} were applied") for n in (3, 4)]
    assert all(0.5 < notes.values[n]["changed"] <= 1 for n in range(1, 5))


def test_parameters_that_move_in_a_step_that_was_not_applied_are_told() -> None:
    t, notes = trainer(), Notes()
    poisoned(t, lambda step: math.nan if step == 2 else 1.0)
    absorbs = t._note_bad_step

    def note(*arguments: Any) -> None:
        absorbs(*arguments)
        t.engine.flat.values.mul_(1.5)

    t._note_bad_step = note  # type: ignore[method-assign]
    for window in windows(3):
        t.step(window, notes)
    (event,) = [event for event in notes.events if event["event"] == "ledger"]
    assert event["step"] == 2
    assert str(event["says"]).startswith("the step was not applied (non-finite loss), but ")


def test_an_update_below_the_rounding_of_the_parameters_is_told() -> None:
    without_zeros = {"bias": False, "norm_options": {"gain": False, "bias": False}}
    t, notes = trainer(model=without_zeros, optim={"name": "sgd", "lr": 1e-30}), Notes()
    t.step(windows(1)[0], notes)
    (event,) = notes.events
    assert (event["event"], notes.values[1]["changed"]) == ("ledger", 0.0)
    assert str(event["says"]).startswith("the step was applied, but no parameter changed")


def test_a_learning_rate_that_is_not_the_schedules_is_told() -> None:
    t, notes = trainer(), Notes()
    original = t._apply

    def apply(lr: float, factor: float) -> None:
        original(lr * 2 if t.attempted == 2 else lr, factor)

    t._apply = apply  # type: ignore[method-assign]
    for window in windows(3):
        t.step(window, notes)
    (event,) = notes.events
    assert (event["step"], event["event"]) == (2, "ledger")
    assert event["says"] == "the learning rate is 0.002, the schedule has 0.001 for applied step 2"


def test_without_an_engine_it_takes_in_steps_all_the_same() -> None:
    ledger = Ledger(stalled=2)
    ledger.begin(1)
    ledger.add(Entry(1, None, None, None, None))
    ledger.after_step(1)
    reading = collect([ledger], lambda x: x, lambda x: x)[0]
    assert (reading.scalars, reading.events) == ({}, [])
