"""Gradients that are sparse, replaced, clipped or not zeroed by their loop."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normscale
from tests.monitor.made import Net, adamw, batches, events, loss_fn, net, record, train


def test_sparse_gradients_are_clipped(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1))
    before = model[0].weight.detach().clone()
    monitor = normscale.Monitor(model, runs=tmp_path, clip=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor.micro_batch():
        loss = 100 * model(torch.tensor([1, 1, 3])).sum()  # a row twice: not coalesced
        loss.backward()
    report = monitor.step(optimizer, loss)
    assert report.grad_norm is not None
    assert report.grad_norm > 1
    moved = float((model[0].weight.detach() - before).norm())
    assert 0 < moved <= 0.5 * 0.1 * 1.001
    monitor.close()


def test_sparse_gradients_are_clipped_after_one_was_bad_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1))
    monitor = normscale.Monitor(model, runs=tmp_path, clip=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reports = []
    for step in (1, 2, 3):
        with monitor.micro_batch():
            loss = 100 * model(torch.tensor([1, 1, 3])).sum()
            loss.backward()
        if step == 2:
            model[0].weight.grad._values()[0] = math.nan
        before = [p.detach().clone() for p in model.parameters()]
        reports.append(monitor.step(optimizer, loss))
        optimizer.zero_grad()
    assert [report.applied for report in reports] == [True, False, True]
    moved = torch.cat([(p.detach() - old).flatten() for p, old in zip(model.parameters(), before, strict=True)])
    assert float(moved.norm()) == pytest.approx(0.1 * 0.5, rel=1e-4)
    monitor.close()


def test_a_sparse_table_of_another_dtype_is_clipped(tmp_path: Path) -> None:
    model = nn.ModuleDict({"table": nn.Embedding(4, 3, sparse=True), "head": nn.Linear(3, 1, dtype=torch.float64)})
    monitor = normscale.Monitor(model, runs=tmp_path, blocks=(), clip=0.5)
    with monitor.micro_batch():
        loss = 100 * model["head"](model["table"](torch.tensor([1, 1, 3])).double()).sum()
        loss.backward()
    norm = torch.stack([p.grad.to_dense().double().norm() for p in model.parameters() if p.grad is not None]).norm()
    report = monitor.step(torch.optim.SGD(model.parameters(), lr=0.1), loss)
    assert report.applied
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-6)
    monitor.close()


class Spectral(nn.Module):
    """A filter with complex weights; of one that conjugates them autograd's gradients are conjugated only in name."""

    def __init__(self, conjugates: bool) -> None:
        super().__init__()
        self.weight, self.conjugates = nn.Parameter(torch.randn(5, dtype=torch.cfloat)), conjugates

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.conj() if self.conjugates else self.weight
        return x + torch.fft.irfft(torch.fft.rfft(x) * weight, n=8)


@pytest.mark.parametrize(("mixed", "conjugates"), [(True, False), (False, False), (False, True)])
def test_complex_parameters_are_checked_clipped_and_recorded(mixed: bool, conjugates: bool, tmp_path: Path) -> None:
    """Alone, and beside real ones. Adam takes no gradient that is conjugated in name, nor does torch's clipping."""
    weights, first = [], []
    for monitored in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[Spectral(conjugates) for _ in range(3)], *([nn.Linear(8, 2)] if mixed else []))
        optimizer = torch.optim.SGD(model.parameters(), 0.1) if conjugates else adamw(model)
        blocks = [str(i) for i in range(3)]
        monitor = normscale.Monitor(model, runs=tmp_path, every=1, clip=0.05, blocks=blocks) if monitored else None
        for _ in range(3):
            batch = torch.randn(4, 8)
            if monitor is not None:
                monitor.micro_batch()
            loss = model(batch).square().mean()
            loss.backward()
            if monitor is None:
                first = first or [float(model[i].weight.grad.norm()) for i in range(3)]
                for p in model.parameters():
                    p.grad = p.grad.resolve_conj()
                assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)) > 0.05
                optimizer.step()
            else:
                assert monitor.step(optimizer, loss).applied
            optimizer.zero_grad()
        weights.append([p.detach().clone() for p in model.parameters()])
    for own, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-6)
    assert monitor is not None
    with monitor.micro_batch():
        loss = model(batch).square().mean()
        loss.backward()
    assert model[1].weight.grad.is_conj() == conjugates
    model[1].weight.grad[2] = complex(0.0, -math.inf)
    assert monitor.step(optimizer, loss).reason == "non-finite gradient"
    found = record(monitor)
    assert events(found, "probe_off") == []
    np.testing.assert_allclose(found.profiles["grad_norm"].data[0], first, rtol=1e-5)
    assert "update_rel" in found.profiles
    assert ("adam_eps_share" in found.profiles) != conjugates
    (bad,) = events(found, "nonfinite")[0]["parameters"]
    assert (bad["name"], bad["kind"], bad["neg_inf"], bad["nan"], bad["pos_inf"]) == ("1.weight", "-Inf", 1, 0, 0)
    assert bad["of"] == 2 * 5  # parts


@pytest.mark.parametrize("norm", [-1.0, torch.tensor(-1.0)])
def test_a_norm_below_zero_says_nothing_so_that_gradients_are_looked_at(norm: Any, tmp_path: Path) -> None:
    model = net(2)
    monitor = normscale.Monitor(model, runs=tmp_path, every=2)
    applied = []
    for bad in (False, True):
        with monitor.micro_batch():
            loss = loss_fn(model, batches(1)[0])
            loss.backward()
        if bad:
            model.head.weight.grad[0, 0] = math.nan
        report = monitor.step(adamw(model), loss, grad_norm=norm)
        applied.append((report.applied, report.reason))
        assert report.grad_norm is not None
        assert not report.grad_norm < 0
    assert applied == [(True, "applied"), (False, "non-finite gradient")]
    assert events(record(monitor), "nonfinite")[0]["parameter"] == "head.weight"


@pytest.mark.parametrize(("order", "there"), [(2.0, True), (math.inf, False)])
def test_gradients_by_block_are_those_before_the_loop_clipped(order: float, there: bool, tmp_path: Path) -> None:
    profiles = []
    for clipped in (False, True):
        model = net(3)
        torch.manual_seed(3)
        monitor = normscale.Monitor(model, runs=tmp_path)
        with monitor.micro_batch():
            loss = loss_fn(model, batches(1)[0])
            loss.backward()
        norm = None
        if clipped:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=order) * (1 if there else 1e-3)
        monitor.step(adamw(model), loss, grad_norm=norm)
        profiles.append(record(monitor))
    if there:
        whole, seen = (found.profiles["grad_norm"].data for found in profiles)
        np.testing.assert_allclose(seen, whole, rtol=1e-4)
    else:
        assert "grad_norm" not in profiles[1].profiles
        assert "grad_norm_clipped" not in profiles[1].series
        assert "not theirs before clipping" in events(profiles[1], "unavailable")[0]["says"]


def test_a_parameter_that_is_replaced_within_an_optimizer_is_checked(tmp_path: Path) -> None:
    model = net(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = normscale.Monitor(model, runs=tmp_path, every=50)
    train(model, monitor, batches(1), optimizer=optimizer)
    new = nn.Parameter(model.blocks[0].proj.weight.detach().clone())
    group = optimizer.param_groups[0]["params"]
    place = next(i for i, p in enumerate(group) if p is model.blocks[0].proj.weight)
    assert 0 < place < len(group) - 1
    model.blocks[0].proj.weight = group[place] = new
    with monitor.micro_batch():
        loss = loss_fn(model, batches(1)[0])
        loss.backward()
    assert new.grad is not None
    new.grad[0, 0] = math.nan
    assert not monitor.step(optimizer, loss).applied
    assert bool(new.isfinite().all())
    monitor.close()


@pytest.mark.parametrize("zeroed", ["after", "within", "in place", "never"])
def test_gradients_that_were_not_zeroed_are_told_of(
    zeroed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = net(2)
    optimizer = adamw(model)
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path)
    reports = []
    for step, batch in enumerate(batches(4), start=1):
        with monitor.micro_batch(batch):
            loss = loss_fn(model, batch)
            if zeroed in ("within", "in place"):
                optimizer.zero_grad(set_to_none=zeroed == "within")
            loss.backward()
        if step in (2, 3):
            assert model.head.weight.grad is not None
            model.head.weight.grad[0, 0] = math.nan
        reports.append(monitor.step(optimizer, loss))
        if zeroed == "after":
            optimizer.zero_grad()
    assert not any(p._backward_hooks for p in model.parameters())
    culprits = [report.culprit for report in reports]
    assert culprits[1] is not None
    assert culprits[1].phase == "backward"  # one rank, one micro-batch: there was no sum
    told = events(record(monitor), "not_zeroed")
    if zeroed != "never":
        assert [report.applied for report in reports] == [True, False, False, True]
        assert culprits[2] is not None
        assert "not zeroed" not in culprits[2].note
        assert told == []
        return
    assert [report.applied for report in reports] == [True, False, False, False]
    for culprit in culprits[2:]:
        assert culprit is not None
        assert "the gradients of step 2 were not zeroed" in culprit.note
        assert culprit.phase == "backward"
    assert [event["step"] for event in told] == [3]
    assert capsys.readouterr().err.count("call optimizer.zero_grad() after every monitor.step") == 1


def test_a_weight_that_blocks_share_counts_once_and_has_its_first_name(tmp_path: Path) -> None:
    arms = []
    for monitored in (False, True):
        model = net(3)
        model.blocks[2].proj.weight = model.blocks[0].proj.weight
        optimizer, data = adamw(model), batches(3)
        monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, every=1) if monitored else None
        torch.manual_seed(3)
        if monitor is not None:
            train(model, monitor, data, optimizer=optimizer)
        for batch in data if monitor is None else ():
            loss_fn(model, batch).backward()
            if not arms:
                norms = [[p.grad.norm() for p in block.parameters() if p.grad is not None] for block in model.blocks]
                norms[2] = norms[2][:2] + norms[2][3:]  # of its norm, and of its bias
                arms.append([torch.stack(own).norm() for own in norms])
                total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
        arms.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(arms[1], arms[2], strict=True))
    assert monitor is not None
    with torch.no_grad():
        model.blocks[0].proj.weight[0, 0] = math.nan
    (report,) = train(model, monitor, data[:1], optimizer=optimizer)
    assert report.culprit is not None
    assert (report.culprit.module, report.culprit.tensor) == ("blocks.0.proj", "weight")
    found = record(monitor)
    np.testing.assert_allclose(found.profiles["grad_norm"].data[0], torch.stack(arms[0]), rtol=1e-5)
    assert found.series["grad_norm"].values[0] == pytest.approx(float(total), rel=1e-6)


def test_an_inner_gradient_is_not_in_the_rows(tmp_path: Path) -> None:
    """As of a gradient penalty: what counts is the gradient of the whole loss."""

    def penalised(model: Net, batch: Tensor) -> Tensor:
        batch = batch.clone().requires_grad_()
        y = model(batch)
        (inner,) = torch.autograd.grad(y.sum(), batch, create_graph=True)
        return y.square().mean() + 10 * inner.square().mean()

    model = net(2)
    for block in model.blocks:
        block.drop.p = 0.0
    batch = batches(1)[0]
    outputs: list[Tensor] = []
    handle = model.blocks[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    (wanted,) = torch.autograd.grad(penalised(model, batch), outputs[-1:])
    handle.remove()
    monitor = normscale.Monitor(model, runs=tmp_path)
    with monitor.micro_batch(batch):
        loss = penalised(model, batch)
        loss.backward()
    monitor.step(adamw(model), loss)
    seen = record(monitor).profiles["stream_grad_norm"].data[0, 0]
    assert seen == pytest.approx(float(wanted.norm()), rel=1e-5)


class Detached(Net):
    """Its blocks are run, and get no gradient, or one of zeros."""

    def __init__(self, factor: float | None) -> None:
        super().__init__(2)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        y = self.blocks[1](self.blocks[0](x))
        return self.head(x + (y.detach() if self.factor is None else self.factor * y))


@pytest.mark.parametrize("kind", ["head", "head and a block", "frozen", "detached", "zeros", "rate of 0"])
def test_blocks_that_a_step_leaves_alone_are_no_alarm(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = Detached({"detached": None, "zeros": 0.0}.get(kind, 1.0))
    parts: list[nn.Module] = [model.head, *([model.blocks[1]] if kind == "head and a block" else [])]
    if kind in ("detached", "zeros", "rate of 0", "frozen"):
        parts += [model.blocks]
    model.blocks.requires_grad_(kind != "frozen")
    groups = [{"params": [*part.parameters()], "lr": 0.1} for part in parts]
    if kind == "rate of 0":
        groups[1]["lr"] = 0.0
    monitor = normscale.Monitor(model, runs=tmp_path, every=1)
    train(model, monitor, batches(3), optimizer=torch.optim.SGD(groups))
    found = record(monitor)
    assert events(found, "ledger") == []
    told = [event["says"] for event in events(found, "unavailable") if event["what"] == "grad_norm"]
    has_none = "the optimizer of this step has no parameter of the blocks that is trained: there are no numbers of them"
    reached = "no parameter of the blocks had a gradient in this step: there are none by block"
    assert told == {"head": [has_none], "frozen": [has_none], "detached": [reached]}.get(kind, [])
    assert "shows no gradients" not in capsys.readouterr().err
    if kind == "head and a block":
        for name in ("grad_norm", "update_rel"):
            first, second = found.profiles[name].data[0]
            assert math.isnan(first)
            assert second > 0


def test_a_step_that_moves_nothing_is_told(tmp_path: Path) -> None:
    model = net(2)
    for block in model.blocks:
        nn.init.ones_(block.norm.bias)  # of what is 0, any step changes something
    monitor = normscale.Monitor(model, runs=tmp_path, every=1)
    train(model, monitor, batches(1), optimizer=torch.optim.SGD(model.parameters(), 1e-30))
    (event,) = events(record(monitor), "ledger")
    assert event["says"].startswith("the step was applied, but no parameter changed")
