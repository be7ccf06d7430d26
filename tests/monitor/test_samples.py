"""Entries of parameters that stand for all of them, and what a monitor holds of a deep model."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normscale
from normscale.monitor import samples
from normscale.monitor.samples import Samples
from tests.monitor.made import batches, events, net, record, train

CPU = torch.device("cpu")


def groups() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(300, 400, generator=generator)
    image = torch.randn(50, 32, 9, 9, generator=generator).to(memory_format=torch.channels_last)
    return [[wide, torch.randn(5, generator=generator)], [], [wide.t()[:7], 3 * image]]


def test_few_entries_are_all_taken_and_sums_are_exact() -> None:
    tensors = groups()
    taken = Samples(tensors, CPU)
    values = taken([x for own in tensors for x in own])
    wanted = [sum(float(x.double().square().sum()) for x in own) for own in tensors]
    np.testing.assert_allclose(taken.sums(values.double().square()), wanted, rtol=1e-12)
    assert not any(taken.partial)


def test_of_many_entries_some_of_each_tensor_estimate_the_sums() -> None:
    tensors = groups()
    flat = [x for own in tensors for x in own]
    taken = Samples(tensors, CPU, most=40_000)
    values = taken(flat)
    assert 20_000 < values.numel() < 40_000
    assert taken.partial == [True, False, True]
    wanted = np.array([sum(float(x.double().square().sum()) for x in own) for own in tensors])
    np.testing.assert_allclose(taken.sums(values.double().square()), wanted, rtol=0.05)
    for x in flat:  # the copy is one, and changes with nothing
        x.zero_()
    assert float(values.abs().min()) > 0
    assert taken.spread(torch.arange(4.0)).unique().tolist() == [0, 1, 2, 3]


def test_what_is_taken_of_a_tensor_is_its_own_wherever_it_lies() -> None:
    base = torch.arange(120_000.0).view(300, 400)
    tensors = [base[100:], base[:100], base[:100].t(), base[:100, 200:], base.view(600, 200)[:100]]
    taken = Samples([[x] for x in tensors], CPU, most=5000)
    values, owner = taken(tensors), taken.spread(torch.arange(5.0))
    for i, (x, partial) in enumerate(zip(tensors, taken.partial, strict=True)):
        own = values[owner == i]
        assert torch.isin(own, x).all()
        assert own.unique().numel() == own.numel()
        assert partial == (own.numel() < x.numel())
    assert taken.partial == [True, True, True, False, True]  # one that is not dense is taken whole


def test_updates_of_a_sample_are_near_those_of_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profiles = []
    for most in (samples.ENTRIES, 4000):
        monkeypatch.setattr(Samples.__init__, "__defaults__", (most,))
        model = net(3, width=64)
        torch.manual_seed(3)
        monitor = normscale.Monitor(model, runs=tmp_path, every=2)
        train(model, monitor, batches(2))
        profiles.append(record(monitor).profiles)
    for name in ("update_rel", "adam_eps_share", "adam_eps_taken"):
        whole, part = (found[name].data for found in profiles)
        np.testing.assert_allclose(part, whole, rtol=0.15, atol=1e-3, err_msg=name)
    assert not np.array_equal(profiles[0]["update_rel"].data, profiles[1]["update_rel"].data)


def test_rows_of_a_table_that_did_not_move_are_no_fault_of_the_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A sample of a table may have none of the few rows that a step moves."""
    monkeypatch.setattr(Samples.__init__, "__defaults__", (64,))
    for module, told in ((nn.Embedding(5000, 4), False), (nn.Linear(4, 5000, bias=False), True)):
        model = nn.Sequential(module)
        monitor = normscale.Monitor(model, runs=tmp_path, blocks=["0"])
        with monitor.micro_batch():
            model[0].weight.grad = torch.zeros(5000, 4)
            model[0].weight.grad[4999] = 1.0  # of no entry that is taken
            model(torch.tensor([4999]) if not told else torch.ones(1, 4))
        monitor.step(torch.optim.SGD(model.parameters(), 0.1), 1.0)
        assert bool(events(record(monitor), "ledger")) == told


def tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Gives every tensor that something holds, but no parameter and nothing of a module."""
    if id(value) in seen or isinstance(value, nn.Module | nn.Parameter | torch.optim.Optimizer):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, seen)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item, seen)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value), seen)


def test_a_thousand_blocks_take_little_memory(tmp_path: Path) -> None:
    """At its most, with what is kept of the weights from before the step until after it."""
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(1000)))
    monitor = normscale.Monitor(model, runs=tmp_path)
    with monitor.micro_batch():
        for block in model:
            x = block(torch.randn(2, 8, 64))
        loss = x.square().mean()
        loss.backward()
    held: list[int] = []

    class Step(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            found = {
                x.untyped_storage().data_ptr(): x
                for probe in monitor.guard.probes
                for x in tensors_in(vars(probe), set())
            }
            held.append(sum(x.untyped_storage().nbytes() for x in found.values()))
            return super().step()

    assert monitor.step(Step(model.parameters()), loss).applied
    assert not events(record(monitor), "probe_off")
    assert 3_000_000 < held[0] < 16_000_000
