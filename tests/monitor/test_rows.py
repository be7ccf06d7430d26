"""The rows over depth against plain autograd, and on models that return and do odd things."""

import copy
import gc
import io
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

import normscale
from normscale.errors import BadInput
from normscale.monitor.blocks import Places, stack_starts
from normscale.monitor.outputs import block_statistics, main_tensor
from tests.monitor.made import Block, Net, adamw, batches, events, hooks, loss_fn, net, record, train


def twin(model: Net, window: list[Tensor]) -> dict[str, np.ndarray]:
    """Returns the profiles of one window by plain autograd, with dropout drawn as in training."""
    outputs: list[list[Tensor]] = [[] for _ in model.blocks]
    model.zero_grad()
    for batch in window:
        x = model.embed(batch)
        for i, block in enumerate(model.blocks):
            x = block(x)
            x.retain_grad()
            outputs[i].append(x)
        loss = model.head(x).float().square().mean() / len(window)
        loss.backward()
    every = [torch.cat([x.detach().flatten() for x in out]).double() for out in outputs]
    grads = [torch.cat([x.grad.flatten() for x in out if x.grad is not None]).double() for out in outputs]
    own = [torch.cat([p.grad.flatten() for p in b.parameters() if p.grad is not None]).double() for b in model.blocks]
    model.zero_grad()
    return {
        "stream_rms": np.array([float(x.square().mean().sqrt()) for x in every]),
        "stream_absmax": np.array([float(x.abs().max()) for x in every]),
        "stream_mean_share": np.array([float(x.mean().abs() / x.square().mean().sqrt()) for x in every]),
        "stream_grad_norm": np.array([float(g.norm()) for g in grads]),
        "stream_grad_absmax": np.array([float(g.abs().max()) for g in grads]),
        "grad_norm": np.array([float(g.norm()) for g in own]),
    }


@pytest.mark.parametrize("accumulate", [1, 3])
def test_profiles_are_those_of_plain_autograd(accumulate: int, tmp_path: Path) -> None:
    window = batches(accumulate)
    model = net(4)
    torch.manual_seed(7)
    expected = twin(model, window)
    before = [torch.cat([p.detach().flatten() for p in b.parameters()]) for b in model.blocks]
    torch.manual_seed(7)
    monitor = normscale.Monitor(model, runs=tmp_path)
    train(model, monitor, window, accumulate)
    found = record(monitor)
    for name, profile in expected.items():
        np.testing.assert_allclose(found.profiles[name].data[0], profile, rtol=1e-5, err_msg=name)
    after = [torch.cat([p.detach().flatten() for p in b.parameters()]) for b in model.blocks]
    moved = [float((a - b).norm() / b.norm()) for a, b in zip(after, before, strict=True)]
    np.testing.assert_allclose(found.profiles["update_rel"].data[0], moved, rtol=1e-4)
    assert found.start["rows"] == [f"blocks.{i}" for i in range(4)]
    assert found.series["stream_last"].values[0] == pytest.approx(expected["stream_rms"][-1], rel=1e-5)
    assert found.series["grad_norm"].values[0] > max(expected["grad_norm"])  # embedding and head are in it, too


def test_rows_are_written_on_measured_steps_alone(tmp_path: Path) -> None:
    model = net(2)
    monitor = normscale.Monitor(model, runs=tmp_path, every=4)
    reports = train(model, monitor, batches(9))
    found = record(monitor)
    assert [report.step for report in reports if report.measured] == [1, 4, 8]
    assert found.profiles["stream_rms"].steps == found.series["loss_train"].steps == [1, 4, 8]


@pytest.mark.parametrize("shape", ["dict", "tuple", "nested"])
def test_what_blocks_return_makes_no_difference(shape: str, tmp_path: Path) -> None:
    """pytorch#87540: full backward hooks never fire where a module returns a mapping."""
    profiles = []
    for kind in ("tensor", shape):
        model = net(3, shape=kind)
        torch.manual_seed(3)
        monitor = normscale.Monitor(model, runs=tmp_path)
        train(model, monitor, batches(1))
        profiles.append(record(monitor).profiles)
    for name in ("stream_rms", "stream_grad_norm"):
        np.testing.assert_array_equal(profiles[1][name].data, profiles[0][name].data)
        assert (profiles[0][name].data > 0).all()


def test_a_change_in_place_after_a_block_neither_raises_nor_is_measured(tmp_path: Path) -> None:
    """pytorch#61519: a full backward hook makes the next operation in place an error."""
    model = net(3, inplace=True)
    torch.manual_seed(5)
    first = []
    handle = model.blocks[0].register_forward_hook(lambda module, args, out: first.append(out.detach().clone()))
    monitor = normscale.Monitor(model, runs=tmp_path)
    reports = train(model, monitor, batches(2))
    handle.remove()
    assert all(report.applied for report in reports)
    seen = record(monitor).profiles["stream_rms"].data[0, 0]
    assert seen == pytest.approx(float(first[0].square().mean().sqrt()), rel=1e-6)


def test_a_checkpointed_block_counts_once(tmp_path: Path) -> None:
    profiles = []
    for kind in ("", "plain"):
        model = net(3)
        model.checkpointed = kind
        torch.manual_seed(3)
        monitor = normscale.Monitor(model, runs=tmp_path)
        train(model, monitor, batches(2), 2)
        profiles.append(record(monitor).profiles)
    for name in profiles[0]:
        np.testing.assert_allclose(profiles[1][name].data, profiles[0][name].data, rtol=1e-6, err_msg=name)


def test_reentrant_checkpointing_is_refused_before_a_step_is_made(tmp_path: Path) -> None:
    model = net(3)
    model.checkpointed = "reentrant"
    before = copy.deepcopy(model.state_dict())
    monitor = normscale.Monitor(model, runs=tmp_path)
    data = [batch.requires_grad_() for batch in batches(1)]
    with pytest.raises(BadInput, match=r"'blocks.\d' is checkpointed with use_reentrant=True.*use use_reentrant=False"):
        train(model, monitor, data)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    monitor.close()


def test_a_block_that_runs_twice_adds_up(tmp_path: Path) -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            self.seen = []
            for block in [*self.blocks, *self.blocks]:
                x = block(x)
                self.seen.append(x.detach())
            return self.head(x)

    torch.manual_seed(0)
    model = Twice(2)
    monitor = normscale.Monitor(model, runs=tmp_path)
    train(model, monitor, batches(1))
    both = torch.stack([model.seen[0], model.seen[2]]).square().mean().sqrt()
    assert record(monitor).profiles["stream_rms"].data[0, 0] == pytest.approx(float(both), rel=1e-6)


def test_a_block_that_is_left_out_of_a_micro_batch_does_not_count_the_one_before_again(tmp_path: Path) -> None:
    class Dropping(Net):
        left_out = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks[: 1 if self.left_out else 2]:
                x = block(x)
                self.seen = x.detach()
            return self.head(x)

    torch.manual_seed(0)
    model = Dropping(2)
    monitor = normscale.Monitor(model, runs=tmp_path)
    seen = []
    for model.left_out in (False, True):
        with monitor.micro_batch():
            loss = loss_fn(model, batches(1)[0])
            loss.backward()
        seen.append(model.seen)
    assert monitor.step(adamw(model), loss).applied
    profile = record(monitor).profiles["stream_rms"].data[0]
    assert profile[1] == pytest.approx(float(seen[0].square().mean().sqrt()), rel=1e-6)


def test_an_evaluation_between_steps_is_not_measured(tmp_path: Path) -> None:
    model = net(2)
    monitor = normscale.Monitor(model, runs=tmp_path, every=1)
    optimizer = adamw(model)
    for batch in batches(2):
        model.eval()
        with torch.no_grad():
            model(1000 * batch)
        model.train()
        monitor.micro_batch(batch)
        loss = loss_fn(model, batch)
        loss.backward()
        with torch.no_grad():
            model.eval()
            model(1000 * batch)
            model.train()
        monitor.step(optimizer, loss)
        optimizer.zero_grad()
    assert (record(monitor).profiles["stream_absmax"].data < 50).all()


def test_fifty_monitors_leave_no_hook(tmp_path: Path) -> None:
    model = net(3)
    before = hooks(model)
    for _ in range(50):
        monitor = normscale.Monitor(model, loss_fn, runs=tmp_path)
        assert hooks(model) > before
        monitor.close()
    assert hooks(model) == before
    normscale.Monitor(model, runs=tmp_path)  # nobody keeps it, nor closes it
    gc.collect()
    assert hooks(model) == before


def test_a_model_is_monitored_once_at_a_time(tmp_path: Path) -> None:
    model = net(2)
    monitor = normscale.Monitor(model, runs=tmp_path)
    with pytest.raises(BadInput, match="monitored already"):
        normscale.Monitor(model, runs=tmp_path)
    monitor.close()
    normscale.Monitor(model, runs=tmp_path).close()


def test_copies_are_not_monitored_and_replaced_blocks_are_told_of(tmp_path: Path) -> None:
    model = net(3)
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, every=1)
    other = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    data = batches(2)
    train(model, monitor, data[:1])
    with monitor.micro_batch(data[1]):
        other(1000 * data[1])
        loaded(1000 * data[1])
    model.blocks[1] = other.blocks[1]
    train(model, monitor, data[1:])
    found = record(monitor)
    assert (found.profiles["stream_absmax"].data[0] < 50).all()
    assert np.isnan(found.profiles["stream_rms"].data[1]).tolist() == [False, True, False]
    assert events(found, "blocks_silent")[0]["blocks"] == ["blocks.1"]
    assert hooks(other)  # they are there, and inert


def test_a_model_that_is_moved_goes_on(tmp_path: Path) -> None:
    model = net(2)
    monitor = normscale.Monitor(model, runs=tmp_path, every=1)
    train(model, monitor, batches(1))
    model.to(torch.float64)
    train(model, monitor, [batch.double() for batch in batches(1)])
    assert (record(monitor).profiles["stream_rms"].data > 0).all()


def test_a_hook_that_fails_is_switched_off_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("no room")

    monkeypatch.setattr("normscale.monitor.rows.block_statistics", broken)
    model = net(2)
    monitor = normscale.Monitor(model, runs=tmp_path, every=1)
    assert [report.applied for report in train(model, monitor, batches(3))] == [True] * 3
    found = record(monitor)
    off = events(found, "probe_off")
    assert [(event["probe"], event["step"]) for event in off] == [("rows", 1)]
    assert "no room" in off[0]["reason"]
    assert "stream_rms" not in found.profiles
    assert found.profiles["grad_norm"].steps == [1, 2, 3]
    assert capsys.readouterr().err.count("switched off") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_statistics_of_a_block(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -2.0, 4.0], [0.0, 0.5, 300.0]], dtype=dtype)
    norm, absmax, bad, total = block_statistics(x).tolist()
    assert norm == pytest.approx(float(x.double().norm()), rel=1e-6)
    assert (absmax, bad, total) == (300.0, 0.0, pytest.approx(303.5, rel=1e-6))
    x[0, 0], x[1, 2] = torch.nan, -torch.inf
    norm, absmax, bad, total = block_statistics(x).tolist()
    assert bad == 2
    assert all(math.isnan(value) for value in (norm, absmax, total))
    assert block_statistics(x[:0]).tolist() == [0, 0, 0, 0]


class Odd:
    """No container at all."""


@pytest.mark.parametrize("output", [None, 3, "x", torch.arange(3), (None, "a"), {}, Odd()])
def test_outputs_without_a_tensor_have_no_row(output: Any) -> None:
    assert main_tensor(output) is None


def test_the_stream_is_found_among_other_outputs() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    assert main_tensor({"attn": y, "hidden_states": x}) is x
    assert main_tensor((torch.arange(3), [x, y])) is x


def test_the_model_update_is_how_far_the_last_blocks_output_has_moved(tmp_path: Path) -> None:
    fixed = batches(1, seed=9)[0]

    def features(model: Net) -> Tensor:
        seen: list[Tensor] = []
        handle = model.blocks[-1].register_forward_hook(lambda module, args, output: seen.append(output.detach()))
        model.eval()
        model(fixed)
        model.train()
        handle.remove()
        return seen[0]

    model = net(3)
    model.blocks[1].eval()  # which the loop wants so, and finds so
    torch.manual_seed(5)
    monitor = normscale.Monitor(
        model,
        lambda model, batch: loss_fn(model, batch + 0 * torch.rand(1)),
        runs=tmp_path,
        every=2,
        update_batch=fixed,
    )
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(5)))
    before, moved = features(model), []
    model.blocks[1].eval()
    for batch in batches(4):
        train(model, monitor, [batch])
        assert [block.training for block in model.blocks] == [True, False, True]
        moved.append(float((features(model) - before).norm(dim=-1).mean()))
        model.blocks[1].eval()
    found = record(monitor)
    assert found.series["update"].steps == [1, 2, 4]
    assert found.series["update"].values == pytest.approx([moved[0], moved[1], moved[3]], rel=1e-5)
    assert 0 < found.summary["update_probe_s"] < found.summary["seconds"]


class Prompt(nn.Module):
    """A block that puts out a parameter as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8).expand(5, 8).clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


@pytest.mark.parametrize("calls", [1, 2])
def test_a_block_that_puts_out_a_parameter_is_seen_once_a_pass(calls: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    prompt, block, head = Prompt(), Block(), nn.Linear(8, 2)
    model = nn.ModuleDict({"prompt": prompt, "block": block, "head": head})
    block.drop.p = 0.0
    monitor = normscale.Monitor(model, runs=tmp_path, every=1, blocks=["prompt", "block"])
    optimizer, wanted = torch.optim.SGD(model.parameters(), 0.1), []
    for step, batch in enumerate(batches(5), start=1):
        if step == 3:
            with suppress(RuntimeError), monitor.micro_batch():
                block(prompt(batch)).view(-1, 7)  # which its size does not allow
        optimizer.zero_grad()
        with monitor.micro_batch():
            for _ in range(calls):
                x = prompt(batch)
            loss = head(block(x)).square().mean()
            loss.backward()
        assert len(prompt.weight._backward_hooks or ()) <= 1
        wanted.append(float(prompt.weight.grad.norm()))
        monitor.step(optimizer, loss)
        assert not prompt.weight._backward_hooks
    with monitor.micro_batch():
        prompt(batch)
        monitor.close()
        assert not prompt.weight._backward_hooks
    found = record(monitor)
    np.testing.assert_allclose(found.profiles["stream_grad_norm"].data[:, 0], wanted, rtol=1e-6)


class Writing(Net):
    """Counts its passes, evaluations too, and keeps what it saw: in place, beside autograd, and in a new tensor."""

    def __init__(self) -> None:
        super().__init__(2)
        for name in ("calls", "mean", "last"):
            self.register_buffer(name, torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.data.mul_(0.9).add_(0.1 * x.detach().mean())
        y = super().forward(x) * (1 + self.last + self.mean) / self.calls
        self.last = x.detach().mean()
        return y


def test_a_pass_for_the_model_update_leaves_no_trace_in_buffers(tmp_path: Path) -> None:
    ends = []
    for fixed in (None, torch.ones(2, 4)):
        torch.manual_seed(0)
        model = Writing()
        monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, every=2, update_batch=fixed)
        train(model, monitor, batches(4))
        ends.append(model.state_dict())
        assert ("update" in record(monitor).series) == (fixed is not None)
    torch.testing.assert_close(*ends, rtol=0, atol=0)
    assert int(ends[0]["calls"]) == 4


def test_a_batch_for_the_model_update_that_cannot_be_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"Monitor\(update_batch=...\): its forward pass failed \(RuntimeError"):
        normscale.Monitor(net(1), loss_fn, runs=tmp_path / "runs", update_batch=torch.ones(2, 9))
    with pytest.raises(BadInput, match="takes loss_fn"):
        normscale.Monitor(net(1), runs=tmp_path / "runs", update_batch=torch.ones(2, 4))
    assert not (tmp_path / "runs").exists()


def test_headroom_is_that_of_the_format_a_block_puts_out(tmp_path: Path) -> None:
    """An fp32 stream beside fp16 products does not overflow with them."""
    model = net(2)
    with torch.no_grad():
        model.embed.weight.mul_(1e5)
    monitor = normscale.Monitor(model, runs=tmp_path)
    with monitor.micro_batch():
        with torch.autocast("cpu", torch.bfloat16):
            x = model.embed(batches(1)[0]).float()
        with torch.autocast("cpu", torch.float16):
            for block in model.blocks:
                x = block(x)
        loss = model.head(x).square().mean()
        loss.backward()
    assert x.dtype is torch.float32
    assert monitor.step(adamw(model), loss).applied
    found = record(monitor).profiles
    wanted = np.log2(torch.finfo(torch.float32).max) - np.log2(found["stream_absmax"].data[0])
    np.testing.assert_allclose(found["headroom_bits"].data[0], wanted, rtol=1e-4)
    assert found["stream_absmax"].data.max() > torch.finfo(torch.float16).max


def test_slopes_over_depth_are_those_of_the_last_stack(tmp_path: Path) -> None:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__(3)
            self.encoder = Net(2).blocks

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            y = 100 * x
            for block in self.encoder:
                y = block(y)
            for block in self.blocks:
                x = block(x)
            return self.head(x + y)

    torch.manual_seed(0)
    model = Two()
    monitor = normscale.Monitor(
        model, runs=tmp_path, blocks=["encoder.0", "encoder.1", "blocks.0", "blocks.1", "blocks.2"]
    )
    train(model, monitor, batches(1))
    found = record(monitor)
    assert found.start["stacks"] == [0, 2]
    for series, profile in (("stream_growth", "stream_rms"), ("grad_slope_now", "grad_norm")):
        rows = found.profiles[profile].data[0, 2:]
        slope = np.polyfit(np.log([1, 2, 3]), np.log(rows), 1)[0]
        assert found.series[series].values[0] == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize(
    ("names", "starts"),
    [
        (["h.0", "h.1"], [0]),
        (["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp"], [0]),
        (["encoder.block.0", "encoder.block.1", "decoder.block.0"], [0, 2]),
        (["embed", "body", "head"], [0]),
        (["0", "1"], [0]),
        (["conv1d.0", "conv2d.0"], [0, 1]),
        ([""], [0]),
    ],
)
def test_stacks_are_told_by_what_stands_before_the_number(names: list[str], starts: list[int]) -> None:
    assert stack_starts(names) == starts


def test_a_replaced_block_has_no_update(tmp_path: Path) -> None:
    model = net(3)
    monitor = normscale.Monitor(model, runs=tmp_path, every=1)
    train(model, monitor, batches(1))
    model.blocks[1] = net(1).blocks[0]
    train(model, monitor, batches(1), optimizer=adamw(model))
    profile = record(monitor).profiles
    for name in ("update_rel", "grad_norm"):
        assert np.isnan(profile[name].data[1]).tolist() == [False, True, False], name


def test_a_block_that_is_wrapped_later_still_stands_in_the_model() -> None:
    model = net(2)
    places, blocks = Places(model), list(model.blocks)
    model.blocks[0] = torch.nn.Sequential(blocks[0])
    assert places.gone(blocks) == [False, False]
    model.blocks = torch.nn.ModuleList(blocks[1:])
    assert places.gone(blocks) == [True, False]


def test_plain_checkpointing_that_runs_to_its_end_is_not_taken_for_reentrant(tmp_path: Path) -> None:
    model = net(2)
    model.checkpointed = "plain"
    monitor = normscale.Monitor(model, runs=tmp_path)
    batch = batches(1)[0]
    with monitor.micro_batch(batch), set_checkpoint_early_stop(False):
        with torch.no_grad():
            model(batch)  # in training mode, as some take a first estimate
        loss = loss_fn(model, batch)
        loss.backward()
    assert monitor.step(adamw(model), loss).applied
    monitor.close()
