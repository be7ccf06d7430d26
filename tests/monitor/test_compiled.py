"""Models that are compiled: hooks work, or their absence is an error; never an empty record."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import normscale
from normscale.errors import BadInput
from tests.monitor.made import Net, adamw, batches, events, loss_fn, net, record

FORMS = ("forward", "wrapper", "in place", "model", "model in place")


def compiled(model: Net, form: str, fullgraph: bool = False) -> Any:
    torch._dynamo.reset()
    counters.clear()
    how: dict[str, Any] = {"backend": "eager", "fullgraph": fullgraph}
    for i, block in enumerate(list(model.blocks)):
        if form == "forward":
            block.forward = torch.compile(block.forward, **how)  # type: ignore[method-assign]
        elif form == "wrapper":
            model.blocks[i] = torch.compile(block, **how)
        elif form == "in place":
            block.compile(**how)
    if form == "model in place":
        model.compile(**how)
    return torch.compile(model, **how) if form == "model" else model


def run(model: nn.Module, inner: Net, data: list[Tensor], monitor: "normscale.Monitor | None") -> list[Tensor]:
    optimizer = adamw(inner)
    for batch in data:
        if monitor is not None:
            monitor.micro_batch(batch)
        loss = loss_fn(model, batch)
        loss.backward()
        if monitor is not None:
            monitor.step(optimizer, loss)
        else:
            optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in inner.parameters()]


def without_dropout(blocks: int) -> Net:
    """Returns a model of so many blocks that compiled code can be compared with: it draws other random numbers."""
    model = net(blocks)
    for block in model.blocks:
        block.drop.p = 0.0
    return model


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_hooks_work_or_the_monitor_refuses(form: str, late: bool, tmp_path: Path) -> None:
    """pytorch#117758: hooks that are added to a model that was compiled and run never run, without a word."""
    inner = without_dropout(12)
    bare = run(inner, inner, batches(4), None)
    inner = without_dropout(12)
    model = compiled(inner, form)
    if late:
        loss_fn(model, batches(1)[0])
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, every=2)
    if late and form.startswith("model"):
        with pytest.raises(BadInput, match="compiled and run before, hooks are passed over"):
            run(model, inner, batches(4), monitor)
        monitor.close()
        return
    seen = run(model, inner, batches(4), monitor)
    assert all(torch.equal(a, b) for a, b in zip(seen, bare, strict=True))
    found = record(monitor)
    profiles = found.profiles
    assert [event["says"] for event in events(found, "unavailable") if event["what"] == "eps_up"]  # not measured as 0
    assert not {"eps_up"} & set(profiles)
    for name in ("stream_rms", "stream_grad_norm", "grad_norm", "update_rel", "angle_online", "branch_ratio"):
        assert profiles[name].data.shape == (3, 12)
        assert np.isfinite(profiles[name].data).all()
        assert (profiles[name].data > 0).all()
    assert counters["stats"]["unique_graphs"] <= 3  # and not one a block


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_compiled_stays_the_same_to_the_bit(tmp_path: Path) -> None:
    """By the default backend, whose kernels hold a whole block; each with dropout."""
    arms = []
    for monitored in (False, True):
        torch._dynamo.reset()
        model = net(2)
        for block in model.blocks:
            block.compile()
        options = {"runs": tmp_path, "every": 3, "update_batch": batches(1)[0]}
        monitor = normscale.Monitor(model, loss_fn, **options) if monitored else None  # type: ignore[arg-type]
        arms.append(run(model, model, batches(50), monitor))
        if monitor is not None:
            assert (record(monitor).profiles["stream_grad_norm"].data > 0).all()
    assert all(torch.equal(a, b) for a, b in zip(*arms, strict=True))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_autocast_of_a_model_that_is_compiled_whole_is_known(
    in_place: bool, fullgraph: bool, tmp_path: Path
) -> None:
    """A weight beyond what fp16 holds goes wrong under it alone; to see it ends no graph."""
    torch._dynamo.reset()
    counters.clear()
    inner = net(2)
    with torch.no_grad():
        inner.blocks[1].proj.weight.fill_(1e5)
    model: nn.Module = inner
    if in_place:
        inner.compile(backend="eager", fullgraph=fullgraph)
    else:
        model = torch.compile(inner, backend="eager", fullgraph=fullgraph)  # type: ignore[assignment]
    monitor, optimizer = normscale.Monitor(model, loss_fn, runs=tmp_path, blocks=()), adamw(inner)
    batch = batches(1)[0]
    for _ in range(2):
        with monitor.micro_batch(batch):
            with torch.autocast("cpu", torch.float16):
                loss = loss_fn(model, batch)
            loss.backward()
        report = monitor.step(optimizer, loss)
        assert report.culprit is not None
        assert (report.culprit.module, report.culprit.phase) == ("blocks.1.proj", "forward")
        optimizer.zero_grad()
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    monitor.close()


@pytest.mark.parametrize("form", ["in place", "model", "model in place"])
def test_hooks_are_left_out_of_a_graph_that_must_be_whole(form: str, tmp_path: Path) -> None:
    """`fullgraph=True`: a hook would part the graph, which is an error in the loop's own forward pass."""
    inner = without_dropout(3)
    bare = run(inner, inner, batches(4), None)
    inner = without_dropout(3)
    model = compiled(inner, form, fullgraph=True)
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, every=2)
    seen = run(model, inner, batches(4), monitor)
    assert all(torch.equal(a, b) for a, b in zip(seen, bare, strict=True))
    with torch.no_grad():
        inner.blocks[1].proj.weight[0, 0] = torch.nan
    with monitor.micro_batch(batch := batches(1)[0]):
        loss = loss_fn(model, batch)
        loss.backward()
    report = monitor.step(adamw(inner), loss)
    assert report.culprit is not None
    assert (report.culprit.module, report.culprit.tensor) == ("blocks.1.proj", "weight")
    found = record(monitor)
    assert {"grad_norm", "update_rel"} <= set(found.profiles)
    assert not {"stream_rms", "stream_grad_norm", "angle_online"} & set(found.profiles)
    told = {event["what"]: event["says"] for event in events(found, "unavailable")}
    assert told["stream_rms"].startswith("blocks are compiled with fullgraph=True, so that hooks are left out")
    assert "block.forward = torch.compile(block.forward, fullgraph=True)" in told["stream_rms"]
    assert ("fullgraph" in told["logz_mean"]) == form.startswith("model")
    assert events(found, "probe_off") == []


@pytest.mark.parametrize("form", ["forward", "wrapper"])
def test_hooks_work_around_a_forward_that_is_compiled_whole(form: str, tmp_path: Path) -> None:
    """The way out that the record of one with `block.compile(fullgraph=True)` names."""
    model = compiled(net(3), form, fullgraph=True)
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path)
    run(model, model, batches(1), monitor)
    assert (record(monitor).profiles["stream_rms"].data > 0).all()


@pytest.mark.parametrize("form", FORMS[:3])
def test_the_culprit_inside_a_compiled_block_is_named(form: str, tmp_path: Path) -> None:
    inner = net(3)
    with torch.no_grad():
        inner.blocks[1].proj.weight[0, 0] = torch.nan
    model = compiled(inner, form)
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path)
    batch = batches(1)[0]
    with monitor.micro_batch(batch):
        loss = loss_fn(model, batch)
        loss.backward()
    report = monitor.step(adamw(inner), loss)
    assert report.culprit is not None
    assert (report.culprit.module, report.culprit.phase, report.culprit.tensor) == (
        "blocks.1.proj",
        "parameter",
        "weight",
    )
    monitor.close()
