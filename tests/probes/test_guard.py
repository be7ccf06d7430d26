"""Probes that fail: switched off, named, and without a trace in training, on one rank or on some."""

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from normscale.probes.activations import Activations
from normscale.probes.gradients import Gradients
from normscale.probes.guard import Guard
from normscale.probes.probe import Array, Hand, Probe, Reading, Subject
from tests.probes.test_probes import trained

METHODS = (
    "meet",
    "due",
    "buffers",
    "begin",
    "after_forward",
    "after_micro_batch",
    "after_backward",
    "after_step",
    "hand_over",
    "read",
)


class Failing(Probe):
    """Hands over its rank and fails in one method, from a step on."""

    name = "failing"

    def __init__(self, method: str, rank: int = 0, at: int = 1) -> None:
        self.rank, self.at, self.step = rank, at, 0
        original = getattr(self, method)

        def fail(*arguments: Any) -> Any:
            step = arguments[0] if method == "due" else self.step
            if step >= self.at or method in ("meet", "buffers", "attach"):
                raise ZeroDivisionError("on\npurpose")
            return original(*arguments)

        setattr(self, method, fail)

    def due(self, step: int) -> bool:
        self.step = step
        return False

    def begin(self, step: int) -> None:
        self.step = step

    def hand_over(self) -> Mapping[str, Hand]:
        return {"a": Hand(torch.ones(2) * self.rank, "sum"), "b": Hand(torch.tensor(float(self.rank)), "max")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        return Reading({"stream_max": float(values["b"][0])})


@pytest.mark.parametrize("method", METHODS)
def test_training_goes_on_without_it(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain, wanted = trained([Gradients()], steps=4)
    probed, notes = trained([Failing(method, at=2), Gradients()], steps=4)
    assert torch.equal(plain.engine.flat.values, probed.engine.flat.values)
    assert list(probed.guard.off) == ["failing"]
    (event,) = notes.events
    assert (event["event"], event["probe"]) == ("probe_off", "failing")
    assert event["reason"] == f"{method}: ZeroDivisionError: on purpose"
    said = capsys.readouterr().err
    assert said == (
        f"normscale: the probe 'failing' is switched off ({event['reason']}); training goes on without it\n"
    )
    times = {"tokens_s", "stream_max"}
    for step in wanted.values:
        assert {k: v for k, v in notes.values[step].items() if k not in times} == {
            k: v for k, v in wanted.values[step].items() if k not in times
        }
    for key, profile in wanted.profiles.items():
        np.testing.assert_array_equal(notes.profiles[key], profile)
    assert ("stream_max" in notes.values[1]) is (method not in ("meet", "buffers"))
    assert "stream_max" not in notes.values[2]


def test_a_probe_that_cannot_be_attached_is_told_at_the_first_step() -> None:
    class Broken(Activations):
        def attach(self, subject: Subject) -> None:
            raise RuntimeError

    guard = Guard([Broken()])
    guard.call("attach", None)
    assert guard.news() == [("activations", "attach: RuntimeError")]
    assert guard.buffers() == {}
    assert guard.collect(1, lambda x: x, lambda x: x) == []


def test_what_it_hands_over_may_be_nonsense() -> None:
    for nonsense in ({"a": 3}, {"a": Hand(torch.ones(1), "mean")}, 7):  # type: ignore[arg-type]
        probe = Failing("attach")
        probe.hand_over = lambda nonsense=nonsense: nonsense  # type: ignore[method-assign,misc,assignment]
        guard = Guard([probe, Other()])
        (reading,) = guard.collect(1, lambda x: x, lambda x: x)
        assert reading.scalars == {"grad_last": 4.0}
        assert list(guard.off) == ["failing"]


def test_a_restart_keeps_it_off_and_takes_back_the_others() -> None:
    trainer, _ = trained([Failing("after_step", at=2)], steps=3)
    state = trainer.guard.state_dict()
    again = Guard([Failing("attach"), Other()])
    again.load_state_dict(state | {"other": {"seen": 5}})
    assert [probe.name for probe in again.active] == ["other"]
    assert again.probes[1].state_dict() == {"seen": 5}
    assert again.news() == []


def test_a_state_that_cannot_be_said_is_the_last_that_could() -> None:
    probe = Other()
    guard = Guard([probe])
    assert guard.state_dict() == {"off": {}, "other": {"seen": 0}}
    probe.state_dict = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    assert guard.state_dict()["other"] == {"seen": 0}
    assert list(guard.off) == ["other"]


class Other(Probe):
    """Hands over 1, 2, 3, ... by measured step."""

    name = "other"

    def __init__(self) -> None:
        self.seen = 0

    def hand_over(self) -> Mapping[str, Hand]:
        self.seen += 1
        return {"x": Hand(torch.full((3,), float(self.seen)), "sum"), "m": Hand(torch.tensor(4.0), "max")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        summed = {"grad_p50": float(values["x"][0])} if self.seen > 1 else {}
        return Reading({"grad_last": float(values["m"][0]), **summed})

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


class Wire:
    """Collectives between threads, which refuse what ranks would hang or crash on: other kinds, sizes or counts."""

    def __init__(self, world: int) -> None:
        self.barrier, self.given = threading.Barrier(world, timeout=20), [(("", 0), torch.zeros(0))] * world
        self.kinds: list[list[str]] = [[] for _ in range(world)]

    def rank(self, rank: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        def reduce(kind: str) -> Callable[[Tensor], Tensor]:
            def run(values: Tensor) -> Tensor:
                self.kinds[rank].append(kind)
                self.given[rank] = ((kind, values.numel()), values.clone())
                self.barrier.wait()
                assert len({what for what, _ in self.given}) == 1, self.given
                stacked = torch.stack([x for _, x in self.given])
                self.barrier.wait()
                return stacked.sum(0) if kind == "sum" else stacked.amax(0)

            return run

        return reduce("sum"), reduce("max")


def on_ranks(make: Callable[[int], list[Probe]], steps: int, world: int = 3) -> tuple[list[Any], Wire, list[Guard]]:
    """What each rank has read at each step, and what it was told."""
    wire, found = Wire(world), [[] for _ in range(world)]
    guards = [Guard(make(rank), rank=rank, world=world) for rank in range(world)]
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            for step in range(1, steps + 1):
                guards[rank].due(step)
                guards[rank].call("begin", step)
                guards[rank].call("after_step", step)
                readings = guards[rank].collect(step, *wire.rank(rank))
                scalars = {k: v for reading in readings for k, v in reading.scalars.items()}
                found[rank].append((scalars, guards[rank].news()))
        except BaseException as error:
            failures.append(error)
            wire.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not failures, failures
    return found, wire, guards


@pytest.mark.parametrize("method", ["begin", "after_step", "hand_over", "read"])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("where", [(0,), (1,), (1, 2), (0, 1, 2)])
def test_ranks_on_which_it_fails_hold_up_no_other(method: str, at: int, where: tuple[int, ...]) -> None:
    def make(rank: int) -> list[Probe]:
        failing = Failing(method if rank in where else "attach", rank, at)
        return [failing, Other()]

    found, wire, guards = on_ranks(make, steps=5)
    for rank, guard in enumerate(guards):
        assert list(guard.off) == ["failing"]
        assert len({reason for guard in guards for reason in guard.off.values()}) == 1
        others = [scalars["grad_last"] for scalars, _ in found[rank]]
        assert others == [4.0] * 5
        assert [scalars.get("grad_p50") for scalars, _ in found[rank]][1:] == [6.0, 9.0, 12.0, 15.0]
    first = where[0]
    (told,) = [(step, news) for step, (_, news) in enumerate(found[0], 1) if news]
    late = method == "read" and first != 0  # the other ranks learn of it the next time they meet
    assert told[0] == at + late
    assert told[1][0][0] == "failing"
    assert told[1][0][1].endswith(f"{method}: ZeroDivisionError: on purpose")
    assert guards[0].off["failing"].startswith(f"rank {first}: {method}")
    seen = [step for step, (scalars, _) in enumerate(found[0], 1) if "stream_max" in scalars]
    assert seen == list(range(1, told[0]))
    assert len({tuple(kinds) for kinds in wire.kinds}) == 1


def test_two_collectives_a_step_once_the_shapes_are_known() -> None:
    _, wire, _ = on_ranks(lambda rank: [Failing("attach", rank), Other()], steps=3)
    assert wire.kinds[0] == ["sum", "sum", "max", *["sum", "max"] * 2]


def test_other_shapes_than_before_switch_a_probe_off_on_all_ranks() -> None:
    class Growing(Other):
        name = "growing"

        def hand_over(self) -> Mapping[str, Hand]:
            self.seen += 1
            return {"x": Hand(torch.ones(self.seen), "sum"), "m": Hand(torch.tensor(1.0), "max")}

    found, _, guards = on_ranks(lambda rank: [Growing(), Other()], steps=3)
    assert [list(guard.off) for guard in guards] == [["growing"]] * 3
    assert [bool(news) for _, news in found[0]] == [False, True, False]


def test_a_nan_of_the_failing_rank_is_not_handed_on() -> None:
    def make(rank: int) -> list[Probe]:
        probe = Failing("after_step" if rank == 1 else "attach", rank, at=2)
        probe.hand_over = lambda: {"a": Hand(torch.full((2,), math.nan), "sum")}  # type: ignore[method-assign]
        probe.read = lambda values: Reading({"stream_max": 1.0})  # type: ignore[method-assign]
        return [probe, Other()]

    found, _, _ = on_ranks(make, steps=3)
    assert [scalars.get("stream_max") for scalars, _ in found[0]] == [1.0, None, None]
