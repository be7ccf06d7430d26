"""Passes that ranks make together: wherever a probe fails in them, ranks stay at the same collectives, or all end."""

import threading
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from normscale.probes import joint as joint_module
from normscale.probes.guard import Guard
from normscale.probes.joint import BrokenPass, Joint
from normscale.probes.probe import Array, Hand, Probe, Reading
from tests.probes.test_guard import Other, Wire

WORLD = 3


class Passing(Probe):
    """Makes two passes of a collective each in `attach` and at steps 2 and 4, and fails in one place on some ranks."""

    name = "passing"
    passes = True

    def __init__(self, joint: Joint, gather: Callable[[], None], fails: str, at: int) -> None:
        self.joint, self.gather, self.fails, self.at = joint, gather, fails, at
        self.step, self.swallows = 0, False

    def fail(self, where: str) -> None:
        if self.fails == where and self.step == self.at:
            raise ZeroDivisionError(where)

    def made(self) -> None:
        self.fail("before")
        self.once()
        self.fail("between")
        if self.fails != "fewer" or self.step != self.at:
            self.once()
        self.fail("after")

    def once(self) -> None:
        with self.joint.passing():
            self.gather()
            self.fail("amid")
            self.gather()

    def attach(self, subject: object) -> None:
        self.made()

    def due(self, step: int) -> bool:
        self.step = step
        self.fail("due")
        return step % 2 == 0

    def after_step(self, step: int) -> None:
        if step % 2 == 0:
            self.made()

    def hand_over(self) -> Mapping[str, Hand]:
        return {"x": Hand(torch.ones(2), "sum")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        return Reading({"update": float(values["x"][0])})


class Ranks:
    """Threads that step through four steps as the loop does, with a probe that fails on some."""

    def __init__(self, fails: str, where: tuple[int, ...], at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wire, self.mine, store = Wire(WORLD), threading.local(), dist.HashStore()
        monkeypatch.setattr(joint_module, "meeting_store", lambda: store)
        monkeypatch.setattr(joint_module, "collectives", lambda device: len(self.wire.kinds[self.mine.rank]))
        monkeypatch.setattr(joint_module, "WAIT_S", 0.2)
        self.recovered: list[int] = []
        self.ended: dict[int, BaseException] = {}
        self.read: list[list[float]] = [[] for _ in range(WORLD)]
        self.guards: list[Guard] = []
        self.reductions = [self._lasting(rank) for rank in range(WORLD)]
        for rank, (add, _) in enumerate(self.reductions):
            joint = Joint(add, torch.device("cpu"), rank, WORLD, lambda rank=rank: self.recovered.append(rank))  # type: ignore[misc]
            gather = lambda add=add: (add(torch.ones(7)), None)[1]  # noqa: E731
            probe = Passing(joint, gather, fails if rank in where else "", at)
            self.guards.append(Guard([probe, Other()], rank=rank, world=WORLD, joint=joint))
        threads = [threading.Thread(target=self._run, args=(rank,)) for rank in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)

    def _lasting(self, rank: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """The rank's collectives, which fail as gloo's do where another rank is gone."""

        def lasting(reduce: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def run(values: Tensor) -> Tensor:
                try:
                    return reduce(values)
                except threading.BrokenBarrierError:
                    raise RuntimeError("[gloo] Connection closed by peer") from None

            return run

        add, most = self.wire.rank(rank)
        return lasting(add), lasting(most)

    def _run(self, rank: int) -> None:
        self.mine.rank = rank
        guard, (add, most) = self.guards[rank], self.reductions[rank]
        try:
            guard.call("attach", None)
            for step in range(1, 5):
                guard.agreed([int(vote) for vote in add(torch.tensor(guard.votes(step)))])
                for method in ("begin", "after_step"):
                    guard.call(method, step)
                readings = guard.collect(step, add, most)
                self.read[rank].append(max(reading.scalars.get("update", 0.0) for reading in readings))
        except BaseException as error:
            self.ended[rank] = error
            self.wire.barrier.abort()


@pytest.mark.parametrize("fails", ["before", "between", "after", "fewer", "due"])
@pytest.mark.parametrize("where", [(0,), (2,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_training_goes_on(fails: str, where: tuple[int, ...], at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(fails, where, at, monkeypatch)
    assert not ranks.ended, ranks.ended
    assert len({tuple(kinds) for kinds in ranks.wire.kinds}) == 1
    if fails == "due" and at == 0:  # before the first step nobody asks
        assert not any(guard.off for guard in ranks.guards)
        return
    if fails == "fewer" and len(where) == WORLD:  # ranks that are alike are well
        assert not any(guard.off for guard in ranks.guards)
        return
    method = "attach" if at == 0 else "due" if fails == "due" else "after_step"
    said = "RuntimeError: it makes fewer passes" if fails == "fewer" else f"ZeroDivisionError: {fails}"
    for guard in ranks.guards:
        assert list(guard.off) == ["passing"]
        assert guard.off["passing"].startswith(f"rank {where[0]}: {method}: {said}")
    well = max(at, 1) - 1
    assert ranks.read == [[3.0] * well + [0.0] * (4 - well)] * WORLD


def test_a_pass_that_fails_alike_everywhere_is_left_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks("amid", (0, 1, 2), 2, monkeypatch)
    assert not ranks.ended, ranks.ended
    assert sorted(ranks.recovered) == [0, 1, 2]
    assert {guard.off["passing"] for guard in ranks.guards} == {"rank 0: after_step: ZeroDivisionError: amid"}


def test_a_pass_that_fails_on_some_ranks_ends_all_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks("amid", (1,), 2, monkeypatch)
    assert ranks.ended.keys() == {0, 1, 2}
    assert all(isinstance(error, BrokenPass) for error in ranks.ended.values())
    (said,) = {str(error) for error in ranks.ended.values()}
    assert said == (
        "the probe 'passing' failed on rank 1 in the middle of a pass that all ranks make together "
        "(ZeroDivisionError: amid); the others cannot go on without it: switch that probe off"
    )
    assert not ranks.recovered


def test_a_lost_rank_is_no_failure_of_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Passing.once

    def once(self: Passing) -> None:
        if self.fails:
            raise KeyboardInterrupt
        original(self)

    monkeypatch.setattr(Passing, "once", once)
    ranks = Ranks("ends", (2,), 0, monkeypatch)
    assert not any(guard.off for guard in ranks.guards)
    assert [type(ranks.ended[rank]) for rank in range(WORLD)] == [RuntimeError, RuntimeError, KeyboardInterrupt]


def test_a_probe_that_overhears_a_failure_elsewhere_leaves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Passing.once

    def once(self: Passing) -> None:
        try:
            original(self)
        except Exception:
            if self.fails:
                raise

    monkeypatch.setattr(Passing, "once", once)
    ranks = Ranks("between", (1,), 2, monkeypatch)
    assert not ranks.ended, ranks.ended
    assert {guard.off["passing"] for guard in ranks.guards} == {"rank 1: after_step: ZeroDivisionError: between"}
