"""Probes make the host wait for a device no oftener than the loop does that reads its loss, on measured steps too.

What those have measured comes while the next step is made. Here waits are counted on a CPU as if its tensors lay on a
device, which shows every call from Python that would wait; on CUDA (`make test-gpu`) it is torch that says so.
"""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import normscale
from normscale.probes import sending
from normscale.probes.sending import sent
from normscale.tracking.reader import read_run
from tests import bench_probes_loops
from tests.bench_probes import CELLS
from tests.bench_probes_loops import TrainerLoop
from tests.host_waits import APART, Apart, device_waits
from tests.monitor.made import batches, loss_fn, net

NEVER = 10**9


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Apart]:
    """Counts waits; numbers that are asked for before the host has waited for something later count as one."""
    with Apart() as found:

        def copied(device: torch.device) -> Callable[[], None]:
            before = found.total
            return lambda: found.waits.append("copy") if found.total == before else None

        monkeypatch.setitem(sending.COPIED, APART.type, copied)
        yield found


def waits_of(apart: Apart, step: Callable[[], object]) -> list[str]:
    apart.waits.clear()
    step()
    return list(apart.waits)


@pytest.mark.parametrize(
    ("step", "waits"),
    [
        (lambda x: float(x.sum()), ["__float__"]),
        (lambda x: x.tolist(), ["tolist"]),
        (lambda x: x.to("cpu", non_blocking=True), []),
        (lambda x: x.cpu().numpy(), ["cpu"]),
        (lambda x: bool((x > 0).all()), ["__bool__"]),
        (lambda x: torch.tensor([1.0], device=x.device), ["tensor"]),
        (lambda x: x.new_tensor([1.0]), ["new_tensor"]),
        (lambda x: x.new_full((2,), 1.0).fill_(3.0), []),
        (lambda x: x.copy_(torch.zeros(3)), ["copy_"]),
        (lambda x: x[torch.tensor([0, 1])], ["__getitem__"]),
        (lambda x: torch.tensor([1.0]).to(x.device), ["to"]),
        (lambda x: sent([1.0, 2.0, 3.0], x.device) + x, []),
        (lambda x: torch.tensor(2.0) * x, []),
        (lambda x: float(torch.tensor(2.0) * 3), []),
    ],
)
def test_what_would_wait_is_counted(apart: Apart, step: Callable[[Tensor], object], waits: list[str]) -> None:
    x = torch.ones(3, device=APART)
    assert (x.device, x.is_cpu, torch.zeros(1).is_cpu) == (APART, False, True)
    assert waits_of(apart, lambda: step(x)) == waits


def test_on_cuda_what_torch_warns_of_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step() -> None:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    assert device_waits(step) == 3
    with pytest.raises(ZeroDivisionError):
        device_waits(lambda: 1 / 0)
    assert modes == ["warn", "default"] * 2


def trainer_loop(folder: Path, **probes: Any) -> TrainerLoop:
    """Returns a loop after its first steps, in which it finds out and allocates what it needs once."""
    loop = TrainerLoop(CELLS["smoke"].config(**probes), folder)
    for step in [*loop.steps.values()] * 2:
        step()
    return loop


def trainer_apart(apart: Apart, monkeypatch: pytest.MonkeyPatch, folder: Path, **probes: Any) -> TrainerLoop:
    make_engine = bench_probes_loops.make_engine

    def made(*arguments: Any) -> Any:
        engine = make_engine(*arguments)
        engine.device = APART
        apart.moved()
        return engine

    monkeypatch.setattr(bench_probes_loops, "make_engine", made)
    loop = trainer_loop(folder, **probes)
    for batch in loop.window:
        apart.brought([batch.tokens_BT, batch.targets_BT])
    return loop


def test_the_trainer_waits_once_a_step(apart: Apart, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loop = trainer_apart(apart, monkeypatch, tmp_path)
    batch = ["to", "to"]  # which every loop brings to the device
    assert waits_of(apart, lambda: float(loop.bare())) == [*batch, "__float__"]
    assert waits_of(apart, loop.steps["always on"]) == [*batch, "tolist"]
    for kind in ("measured", "measured", "always on"):  # the numbers of one come with the next
        assert waits_of(apart, loop.steps[kind]) == [*batch, "tolist"]
    loop.steps["measured"]()
    assert waits_of(apart, lambda: loop.trainer.settle(loop.recorder)) == ["copy"]


def test_nor_do_probes_with_passes_of_their_own(apart: Apart, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    every = {"epsilon": {"every": 1}, "update": {"every": 1}}
    loop = trainer_apart(apart, monkeypatch, tmp_path, **every)
    assert {"update", "epsilon", "adam"} <= {probe.name for probe in loop.session.guard.active}
    for _ in range(2):
        assert waits_of(apart, loop.steps["measured"]) == ["to", "to", "tolist"]


class Watched:
    """A loop as people write it, with a monitor in it or without; either reads one number of each step."""

    def __init__(self, folder: Path, device: torch.device | None = None, scaler: Any = None) -> None:
        self.model, self.batch, self.folder, self.scaler = net(3), batches(1)[0], folder, scaler
        self.model.register_buffer("calls", torch.zeros(()))
        self.model.register_forward_hook(lambda module, args, output: 0 * module.calls.add_(1) + output)
        if device is not None:
            self.model, self.batch = self.model.to(device), self.batch.to(device)

    def attach(self, fused: bool, lr: float | Tensor = 1e-3) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr, fused=fused)
        self.monitor = normscale.Monitor(self.model, loss_fn, runs=self.folder, every=1, update_batch=self.batch)
        for every in (1, NEVER, 1):  # what is found out and allocated once
            self.stepped(every)

    def backward(self) -> Tensor:
        loss = loss_fn(self.model, self.batch)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach()

    def bare(self) -> None:
        self.optimizer.zero_grad()
        loss = self.backward()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        float(loss)

    def stepped(self, every: int) -> None:
        self.monitor.every = every
        self.optimizer.zero_grad()
        with self.monitor.micro_batch(self.batch):
            loss = self.backward()
        assert self.monitor.step(self.optimizer, loss, scaler=self.scaler).applied


@pytest.mark.parametrize("fused", [True, False])
def test_a_monitored_loop_waits_as_often_as_a_bare_one(fused: bool, apart: Apart, tmp_path: Path) -> None:
    """Of an optimizer that is not fused the count of steps lies on the host."""
    loop = Watched(tmp_path)
    apart.moved()
    loop.attach(fused)
    for every in (NEVER, 1, 1, NEVER):
        assert waits_of(apart, lambda: loop.stepped(every)) == ["tolist"]  # noqa: B023
    assert waits_of(apart, loop.bare) == ["__float__"]
    loop.monitor.close()


def test_with_a_learning_rate_on_the_device_too(apart: Apart, tmp_path: Path) -> None:
    loop, rate = Watched(tmp_path), torch.tensor(1e-2)
    apart.moved()
    loop.attach(fused=True, lr=rate)
    for step, every in enumerate((NEVER, 1, 1, NEVER), start=4):
        rate.fill_(1e-3 * step)
        assert waits_of(apart, lambda: loop.stepped(every)) == ["tolist"]  # noqa: B023
        rate.fill_(1.0)  # as a scheduler does after a step, before the next one is read
    assert waits_of(apart, loop.bare) == ["__float__"]
    loop.monitor.close()
    found = read_run(loop.monitor.run_dir)
    wanted = [1e-2] * 3 + [4e-3, 5e-3, 6e-3, 7e-3]
    assert [row["lr"] for row in found.ledger] == pytest.approx(wanted)
    series = found.series["lr"]
    assert series.values == pytest.approx([wanted[step - 1] for step in series.steps])
    assert not [event for event in found.events if event["event"] == "ledger"]


def test_with_a_loss_scale_too(apart: Apart, tmp_path: Path) -> None:
    """The scaler itself waits for what it has found; what it has become comes with the next step."""
    loop = Watched(tmp_path, scaler=torch.amp.GradScaler("cpu", init_scale=2.0))
    apart.moved()
    loop.attach(fused=False)
    for every in (NEVER, 1, 1, NEVER):
        assert waits_of(apart, lambda: loop.stepped(every)) == ["tolist", "item"]  # noqa: B023
    assert waits_of(apart, loop.bare) == ["item", "__float__"]
    loop.monitor.close()


@pytest.mark.gpu
def test_on_a_gpu_the_trainer_waits_once_a_step(tmp_path: Path) -> None:
    loop = trainer_loop(tmp_path)
    bare = device_waits(lambda: float(loop.bare()))
    assert bare > 0
    assert device_waits(loop.steps["always on"]) == bare
    assert device_waits(loop.steps["measured"]) == bare
    assert device_waits(loop.steps["always on"]) == bare
    loop.close()


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_on_a_gpu_a_monitored_loop_waits_as_often_as_a_bare_one(fused: bool, tmp_path: Path) -> None:
    loop = Watched(tmp_path, torch.device("cuda"))
    loop.attach(fused)
    always, measured, bare = (
        device_waits(step) for step in (lambda: loop.stepped(NEVER), lambda: loop.stepped(1), loop.bare)
    )
    assert bare > 0
    assert (always, measured) == (bare, bare)
    loop.monitor.close()
