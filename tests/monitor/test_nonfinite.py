"""Steps that are not finite: not applied, explained, and what comes after."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normscale
from normscale.cli import main
from normscale.errors import BadInput, NonFiniteStop
from normscale.monitor.provenance import _joined
from normscale.tracking.event_report import report_of
from tests.monitor.made import Poison, adamw, batches, events, loss_fn, marked, net, record, train

INF = float("inf")


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    kept = [p.detach().clone() for p in model.parameters()]
    return kept + [
        value.clone() for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    ]


@pytest.mark.parametrize(
    ("module", "value", "backward", "phase", "kind", "tensor"),
    [
        ("blocks.1.proj", math.nan, False, "forward", "NaN", "output"),
        ("blocks.2.norm", INF, False, "forward", "+Inf", "output"),
        ("blocks.0.drop", -INF, False, "forward", "-Inf", "output"),
        ("head", math.nan, False, "forward", "NaN", "output"),
    ],
)
def test_the_first_bad_value_is_named_and_the_step_not_applied(
    module: str,
    value: float,
    backward: bool,
    phase: str,
    kind: str,
    tensor: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = net(3)
    Poison(model, module, value, backward)
    optimizer = adamw(model)
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path)
    data = batches(3)
    data[1] = marked(data[1])
    train(model, monitor, data[:1], optimizer=optimizer)
    before = state_of(model, optimizer)
    (bad,) = train(model, monitor, data[1:2], optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(state_of(model, optimizer), before, strict=True))
    assert (bad.applied, bad.step, bad.in_a_row) == (False, 2, 1)
    assert bad.reason == ("non-finite gradient" if module == "blocks.2.norm" else "non-finite loss")  # tanh(inf) is 1
    assert bad.culprit is not None
    assert bad.culprit.reproduced
    assert (bad.culprit.module, bad.culprit.phase, bad.culprit.kind) == (module, phase, kind)
    assert bad.culprit.tensor.startswith(tensor)
    (good,) = train(model, monitor, data[2:], optimizer=optimizer)
    assert good.applied
    assert good.in_a_row == 0
    found = record(monitor)
    (event,) = events(found, "nonfinite")
    assert event["culprit"]["module"] == module
    assert (event["step"], event["policy"], event["in_a_row"]) == (2, "skip", 1)
    if module.startswith("blocks"):
        assert found.start["rows"][event["layer"]] == module.rpartition(".")[0]
        assert [entry["step"] for entry in event["run_up"]] == [1]
        assert event["run_up"][0]["stream_rms"] == pytest.approx(
            float(found.profiles["stream_rms"].data[0, event["layer"]])
        )
        assert "run_up_of" not in event
    else:
        wanted = {name: found.series[name].values[0] for name in ("loss_train", "grad_norm", "stream_first")}
        (row,) = event["run_up"]
        assert (event["layer"], row["step"]) == (-1, 1)
        assert {name: row[name] for name in wanted} == pytest.approx(wanted)
        assert event["run_up_of"] == "the whole model, as what went bad is in no block that is known"
        (table,) = [table for table in report_of(found, event).tables if table.title.startswith("Run-up")]
        assert "steps of the whole model, as" in table.title
        assert [line[0] for line in table.rows][:2] == ["loss_train", "grad_norm"]
        capsys.readouterr()
        assert main(["show", monitor.run_dir.as_posix()]) == 0
        assert "of the whole model" in capsys.readouterr().out


def test_a_gradient_that_goes_wrong_on_the_way_back_is_told_from_the_forward(tmp_path: Path) -> None:
    model = net(3)
    Poison(model, "blocks.1.proj", backward=True)
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path)
    (report,) = train(model, monitor, [marked(batches(1)[0])])
    assert report.reason == "non-finite gradient"
    assert report.culprit is not None
    found = report.culprit
    assert (found.phase, found.module, found.tensor) == ("backward", "blocks.1.proj", "gradient of bias")
    assert (found.kind, found.nan, found.of) == ("NaN", 1, 8)
    assert math.isfinite(report.loss or 0)
    monitor.close()


def test_a_parameter_that_is_bad_before_the_pass_is_named(tmp_path: Path) -> None:
    model = net(3)
    with torch.no_grad():
        model.blocks[1].norm.bias[2] = -INF
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path)
    (report,) = train(model, monitor, batches(1))
    assert report.culprit is not None
    assert (report.culprit.phase, report.culprit.module, report.culprit.tensor, report.culprit.kind) == (
        "parameter",
        "blocks.1.norm",
        "bias",
        "-Inf",
    )
    (event,) = events(record(monitor), "nonfinite")
    assert (event["parameter"], event["layer"]) == ("blocks.1.norm.bias", 1)


class Mask(nn.Module):
    """Gives scores whose later positions are -Inf, and the numbers of positions, as attention has them."""

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(scores.shape[-1])
        return scores.masked_fill(places > places[:, None], -INF), places


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.mask, self.out = nn.Linear(4, 8), Mask(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        scores, _ = self.mask(x @ x.T)
        return self.out(scores.softmax(-1) @ x)  # type: ignore[no-any-return]


def test_a_mask_of_minus_infinity_is_no_event_and_no_culprit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Attending()
    Poison(model, "out")
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, every=1)
    good, bad = train(model, monitor, [batches(1)[0], marked(batches(1)[0])])
    assert good.applied
    assert bad.culprit is not None
    assert (bad.culprit.module, bad.culprit.kind) == ("out", "NaN")
    assert [event["step"] for event in events(record(monitor), "nonfinite")] == [2]


def test_counts_of_gradients_that_are_not_finite_are_those_of_plain_autograd(tmp_path: Path) -> None:
    model = net(4)
    for block in model.blocks:
        block.drop.p = 0.0
    Poison(model, "blocks.2.proj", INF, backward=True)
    batch, outputs = marked(batches(1)[0]), list[Tensor]()
    handles = [block.register_forward_hook(lambda module, args, out: outputs.append(out)) for block in model.blocks]
    gradients = torch.autograd.grad(loss_fn(model, batch), outputs)
    for handle in handles:
        handle.remove()
    wanted = [int((~gradient.isfinite()).sum()) for gradient in gradients]
    assert wanted[0] >= wanted[1] > wanted[2] == wanted[3] == 0
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path)
    train(model, monitor, [batch])
    assert record(monitor).profiles["stream_grad_nonfinite"].data[0].tolist() == wanted


def test_one_micro_batch_of_four_is_named_with_dropout_drawn_as_it_was(tmp_path: Path) -> None:
    model = net(2)
    Poison(model, "blocks.1.proj")
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path)
    data = batches(4)
    data[2] = marked(data[2])
    after: list[Tensor] = []
    (report,) = train(model, monitor, data, accumulate=4)
    after.append(torch.rand(1))
    assert report.culprit is not None
    assert (report.culprit.micro_batch, report.culprit.module) == (2, "blocks.1.proj")
    torch.manual_seed(0)  # what `net` begins with; the same draws without a monitor
    model = net(2)
    for batch in data:
        loss_fn(model, batch)
    assert torch.equal(torch.rand(1), after[0])
    monitor.close()


def test_a_loss_function_that_takes_its_batch_apart_can_be_replayed(tmp_path: Path) -> None:
    model = net(2)
    Poison(model, "blocks.0.proj")

    def popping(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        target = batch.pop("target")
        return (model(batch.pop("x")) - target).square().mean()

    monitor = normscale.Monitor(model, popping, runs=tmp_path)
    batch = {"x": marked(batches(1)[0]), "target": torch.ones(5, 2)}
    with monitor.micro_batch(batch):
        loss = popping(model, batch)
        loss.backward()
    report = monitor.step(adamw(model), loss)
    assert report.culprit is not None
    assert report.culprit.module == "blocks.0.proj"
    monitor.close()


def test_the_replay_runs_under_the_loops_autocast(tmp_path: Path) -> None:
    model = net(2)
    with torch.no_grad():
        model.blocks[1].proj.weight.fill_(1e4)
        model.blocks[1].proj.weight.requires_grad_(False)
    monitor = normscale.Monitor(model, lambda model, batch: model(batch).float().sum(), runs=tmp_path)
    seen: list[torch.dtype] = []
    model.blocks[0].proj.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    Poison(model, "blocks.0.proj")
    batch = marked(batches(1)[0])
    with monitor.micro_batch(batch):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch).float().sum()
        loss.backward()
    report = monitor.step(adamw(model), loss)
    assert report.culprit is not None
    assert len(seen) > 1
    assert set(seen) == {torch.bfloat16}
    monitor.close()


@pytest.mark.parametrize("between", ["update", "evaluation"])
def test_passes_without_autocast_are_not_taken_for_the_loops(between: str, tmp_path: Path) -> None:
    """A weight beyond what fp16 holds goes wrong there alone."""
    model = net(2)
    with torch.no_grad():
        model.blocks[1].proj.weight.fill_(1e5)
    batch = batches(1)[0]
    more: Any = {"update_batch": batch} if between == "update" else {}
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, **more)
    with monitor.micro_batch(batch):
        with torch.autocast("cpu", torch.float16):
            loss = loss_fn(model, batch)
        loss.backward()
    if between == "evaluation":
        assert loss_fn(model, batch).isfinite()
    report = monitor.step(adamw(model), loss)
    assert report.culprit is not None
    assert (report.culprit.module, report.culprit.phase) == ("blocks.1.proj", "forward")
    monitor.close()


def test_without_a_loss_function_rows_tell_the_block_and_say_so(tmp_path: Path) -> None:
    """The first bad step is not measured, so that gradients alone tell; the next one has rows."""
    model = net(4)
    Poison(model, "blocks.2.drop", INF)
    monitor = normscale.Monitor(model, runs=tmp_path)
    data = batches(1) + [marked(batch) for batch in batches(2)]
    reports = train(model, monitor, data)
    assert [report.applied for report in reports] == [True, False, False]
    first, second = reports[1].culprit, reports[2].culprit
    assert first is not None
    assert second is not None
    assert not first.reproduced
    assert "no loss_fn was given" in first.note
    assert first.module == "(loss)"
    assert (second.module, second.phase, second.kind, second.nan + second.pos_inf) == ("blocks.2", "forward", "+Inf", 1)
    assert "by rows of the blocks" in second.note
    assert [event["layer"] for event in events(record(monitor), "nonfinite")] == [-1, 2]


def test_a_module_that_was_sharded_has_the_class_that_its_owner_wrote(tmp_path: Path) -> None:
    """`fully_shard` gives every module a class of its own, of this module and name."""
    model = net(4)
    kinds = {type(module) for module in model.modules()}
    own = {kind: type(f"FSDP{kind.__name__}", (kind,), {"__module__": "torch.distributed.fsdp._x"}) for kind in kinds}
    for module in model.modules():
        module.__class__ = own[type(module)]
    Poison(model, "blocks.2.drop", INF)
    monitor = normscale.Monitor(model, runs=tmp_path)
    (report,) = train(model, monitor, [marked(batches(1)[0])])
    assert report.culprit is not None
    assert (report.culprit.module, report.culprit.type) == ("blocks.2", "Block")
    assert record(monitor).start["model"]["class"] == "Net"


def test_without_a_loss_function_backward_rows_tell_the_last_block_first(tmp_path: Path) -> None:
    model = net(4)
    Poison(model, "blocks.2.proj", backward=True)
    monitor = normscale.Monitor(model, runs=tmp_path)
    (report,) = train(model, monitor, [marked(batches(1)[0])])
    assert report.culprit is not None
    # The gradient of block 1's output is the first that a row shows: it went wrong in block 2.
    assert (report.culprit.module, report.culprit.phase) == ("blocks.1", "backward")
    assert "between it and the one after" in report.culprit.note
    monitor.close()


def test_of_the_gradients_the_last_in_the_model_tells_whatever_the_optimizer_has_last(tmp_path: Path) -> None:
    """As where biases and norms, which are not decayed, are a group of their own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2, bias=False))
    Poison(model, "2", backward=True)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == deep] for deep in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
    monitor = normscale.Monitor(model, runs=tmp_path)
    good, bad = train(model, monitor, [batches(1)[0], marked(batches(1)[0])], optimizer=optimizer)
    assert (good.applied, bad.measured) == (True, False)
    assert bad.culprit is not None
    assert (bad.culprit.module, bad.culprit.tensor) == ("2", "gradient of weight")
    (event,) = events(record(monitor), "nonfinite")
    assert event["parameter"] == "2.weight"
    assert [one["name"] for one in event["parameters"]] == [name for name, _ in model.named_parameters()]


def test_a_norm_of_finite_gradients_that_overflows_is_told_from_a_bad_gradient(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    monitor = normscale.Monitor(model, lambda model, batch: model(batch).sum(), runs=tmp_path, clip=1.0)
    batch = torch.full((1, 2), 1e30)
    with monitor.micro_batch(batch):
        loss = model(batch).sum()
        loss.backward()
    report = monitor.step(torch.optim.SGD(model.parameters(), 1e-40), loss)
    assert report.reason == "norm overflow"
    assert report.culprit is not None
    assert report.culprit.phase == "norm"
    (event,) = events(record(monitor), "nonfinite")
    assert event["fault"].startswith("norm overflow")
    assert event["parameters_bad"] == 0


def test_a_norm_that_is_for_the_record_alone_stops_no_step_and_does_not_overflow(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    monitor = normscale.Monitor(model, runs=tmp_path, every=1)
    batch = torch.full((1, 2), 1e30)
    with monitor.micro_batch(batch):
        loss = model(batch).sum()
        loss.backward()
    assert monitor.step(torch.optim.SGD(model.parameters(), 1e-40), loss).applied
    assert record(monitor).series["grad_norm"].values == [pytest.approx(2e30)]


def test_the_log_has_the_bad_step_and_what_became_of_the_parameters(tmp_path: Path) -> None:
    """transformers#13619: NaN at step 3 of 6."""
    model = net(2)
    Poison(model, "head")
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, every=1)
    data = batches(6)
    data[2] = marked(data[2])
    train(model, monitor, data)
    found = record(monitor)
    assert math.isnan(found.series["loss_train"].values[2])
    assert found.series["nonfinite"].values == [0, 0, 1, 0, 0, 0]
    assert found.series["skipped"].values == [0, 0, 1, 1, 1, 1]
    assert found.series["applied"].values == [1, 2, 2, 3, 4, 5]
    assert [math.isfinite(x) for x in found.series["loss_train"].values] == [True, True, False, True, True, True]
    assert found.end is not None
    assert found.end["outcome"] == "finished"
    assert found.summary["bad_step"] == 3


def test_a_gradient_of_inf_is_recorded_before_clipping_and_leaves_the_optimizer_alone(tmp_path: Path) -> None:
    """pytorch#46849: gradients [1, 2, 3] and [1, inf, 3], clipped at 1."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

        def forward(self, factors: Tensor) -> Tensor:
            return (self.first * torch.tensor([1.0, 2.0, 3.0]) + self.second * factors).sum()

    model = Two()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = normscale.Monitor(model, runs=tmp_path, blocks=(), clip=1.0)
    factors = torch.tensor([1.0, 2.0, 3.0])
    with monitor.micro_batch():
        loss = model(factors)
        loss.backward()
    assert monitor.step(optimizer, loss).applied
    before = state_of(model, optimizer)
    optimizer.zero_grad()
    with monitor.micro_batch():
        loss = model(factors)
        loss.backward()
    assert model.second.grad is not None
    model.second.grad[1] = INF
    report = monitor.step(optimizer, loss)
    assert not report.applied
    assert all(torch.equal(a, b) for a, b in zip(state_of(model, optimizer), before, strict=True))
    (event,) = events(record(monitor), "nonfinite")
    assert [(bad["name"], bad["kind"], bad["pos_inf"], bad["nan"]) for bad in event["parameters"]] == [
        ("second", "+Inf", 1, 0)
    ]
    assert event["parameter"] == "second"


@pytest.mark.parametrize(("policy", "stops_at"), [("skip", None), ("stop", 2), (2, 3), (3, None)])
def test_policies(policy: Any, stops_at: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = net(2)
    Poison(model, "blocks.1.proj")
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, on_nonfinite=policy)
    data = batches(5)
    data[1], data[2] = marked(data[1]), marked(data[2])
    if stops_at is None:
        assert [report.applied for report in train(model, monitor, data)] == [True, False, False, True, True]
        assert record(monitor).end["outcome"] == "finished"  # type: ignore[index]
        return
    with pytest.raises(NonFiniteStop, match=r"stopped at step .*NaN in output.*blocks\.1\.proj.*records: ") as stopped:
        train(model, monitor, data)
    assert monitor.steps == stops_at
    assert stopped.value.exit_code == 3
    found = record(monitor)
    assert found.end is not None
    assert (found.end["outcome"], found.end["exit_code"]) == ("nan", 3)
    with pytest.raises(BadInput, match="this monitor is closed"):
        monitor.micro_batch(data[0])
    assert main(["show", monitor.run_id, "--runs", str(tmp_path)]) == 0
    assert "blocks.1" in capsys.readouterr().out


def test_a_model_that_ends_on_its_own_error_says_so(tmp_path: Path) -> None:
    for error, outcome in ((ValueError("mine"), "error"), (KeyboardInterrupt(), "interrupted")):
        with pytest.raises(type(error)), normscale.Monitor(net(1), runs=tmp_path) as monitor:
            raise error
        end = record(monitor).end
        assert end is not None
        assert end["outcome"] == outcome


def test_spikes_and_alarms_are_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = net(2)
    Poison(model, "head")
    monitor = normscale.Monitor(model, runs=tmp_path, blocks=())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = [batch.clamp(-1, 1) for batch in batches(40)]
    data[35] = 100 * data[35]
    train(model, monitor, data, optimizer=optimizer)
    train(model, monitor, [marked(batch) for batch in batches(6)], optimizer=optimizer)
    found = record(monitor)
    (spike,) = events(found, "spike")
    assert (spike["step"], spike["of"]) == (36, "loss")
    before = np.array([loss_fn(model, batch).item() for batch in data[:35]])  # the model stood still
    assert spike["sigmas"] == pytest.approx((spike["value"] - before.mean()) / before.std(), rel=0.2)  # but dropout
    (alarm,) = events(found, "stalled")
    assert (alarm["step"], alarm["in_a_row"], alarm["reasons"]) == (45, 5, "non-finite loss x5")
    said = (
        "normscale: step 45: 5 steps in a row were not applied (non-finite loss x5); the weights are those of 5 steps"
    )
    assert capsys.readouterr().err.count(said) == 1


def test_what_is_an_alarm_or_a_spike_can_be_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An overflow of the loss scale counts among the steps that are not applied."""
    model = net(2)
    for block in model.blocks:
        block.drop.p = 0.0
    options: Any = {"stalled": 2, "spike_sigmas": 50.0, "spike_window": 4, "blocks": ()}
    monitor = normscale.Monitor(model, runs=tmp_path, clip=1e9, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = batches(1)[0].clamp(-1, 1)
    for factor in (1, 1.1, 1, 1.1, 2, 1e9, 1e9, 1e9):  # the spread is 0.05 until the 2 comes, which is 20 times that
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126) if monitor.steps >= 6 else None
        with monitor.micro_batch():
            loss = loss_fn(model, batch) * factor
            (loss if scaler is None else scaler.scale(loss)).backward()
        monitor.step(optimizer, loss, scaler=scaler)
        optimizer.zero_grad()
    found = record(monitor)
    assert {(event["step"], event["of"]) for event in events(found, "spike")} == {(6, "loss"), (6, "grad_norm")}
    (alarm,) = events(found, "stalled")
    assert (alarm["step"], alarm["reasons"]) == (8, "loss scale overflow x2")
    assert "step 8: 2 steps in a row were not applied (loss scale overflow x2)" in capsys.readouterr().err
    assert found.start["config"]["monitor"] == found.start["config"]["monitor"] | {"stalled": 2, "spike_window": 4}


def test_a_step_that_is_not_applied_leaves_no_trace_in_the_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    Poison(model, "2")
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path)
    batch = marked(batches(1)[0])
    before = copy.deepcopy(model.state_dict())
    with monitor.micro_batch(batch):
        loss = loss_fn(model, batch)
        loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    monitor.step(adamw(model), loss)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(after, grads, strict=True))
    monitor.close()


def test_running_averages_are_those_of_the_steps_that_were_applied(tmp_path: Path) -> None:
    """The same steps without a monitor, and without the bad one, come to the same."""
    data = batches(5)

    def averages(data: list[Tensor], monitored: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        optimizer = adamw(model)
        if monitored:
            monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, every=2)
            reports = train(model, monitor, data, optimizer=optimizer)
            monitor.close()
            culprits = [report.culprit for report in reports if report.culprit is not None]
            assert [(culprit.phase, culprit.tensor) for culprit in culprits] == [("data", "input[0]")] * 2
        else:
            for batch in data:
                loss_fn(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return list(model.state_dict().values())

    spoilt = torch.full((5, 4), math.nan)
    with_bad = averages([spoilt, *data[:3], spoilt, *data[3:]], monitored=True)
    assert all(torch.equal(a, b) for a, b in zip(with_bad, averages(data, monitored=False), strict=True))


def test_a_sparse_buffer_stops_no_step_and_no_replay(tmp_path: Path) -> None:
    """As the graph of a graph network, in a checkpoint or not."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("edges", torch.eye(5).to_sparse())
            self.register_buffer("cache", torch.eye(5).to_sparse(), persistent=False)
            self.linear, self.norm = nn.Linear(4, 2), nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(self.edges @ (self.cache @ x)))  # type: ignore[no-any-return]

    model = Graph()
    Poison(model, "linear")
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path)
    data = batches(3)
    good, bad, after = train(model, monitor, [data[0], marked(data[1]), data[2]])
    assert (good.applied, bad.applied, after.applied) == (True, False, True)
    assert bad.culprit is not None
    assert bad.culprit.module == "linear"
    assert int(model.norm.num_batches_tracked) == 2
    monitor.close()


def test_a_sum_that_overflows_in_a_batch_norm_is_not_put_down_to_its_averages(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[0].weight.data.mul_(1e38).abs_()
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, blocks=())
    batch = torch.rand(8, 4) * 2
    assert torch.isfinite(model[0](batch)).all()
    (report,) = train(model, monitor, [batch])
    assert report.culprit is not None
    assert (report.culprit.phase, report.culprit.module, report.culprit.tensor) == ("forward", "1", "output")
    monitor.close()


def test_one_buffer_for_all_micro_batches_is_told(tmp_path: Path) -> None:
    model, buffer = net(1), torch.zeros(5, 4)
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, blocks=())
    total = torch.zeros(())
    for value in (math.nan, 1.0):
        buffer.fill_(value)
        with monitor.micro_batch(buffer):
            loss = loss_fn(model, buffer)
            loss.backward()
        total += loss.detach()
    report = monitor.step(adamw(model), total)
    assert report.culprit is not None
    assert "micro-batch 0 was written to after it ran" in report.culprit.note
    (event,) = events(record(monitor), "nonfinite")
    assert "a batch of its own each time" in event["replay_refused"]


def test_a_replay_of_other_numbers_does_not_blame_the_reduction(tmp_path: Path) -> None:
    model, buffer = nn.Linear(4, 2), torch.full((5, 4), 1e30)
    monitor = normscale.Monitor(model, lambda model, batch: model(batch).sum() * 1e9, runs=tmp_path, blocks=())
    with monitor.micro_batch(buffer):
        loss = (model(buffer) * 1e-30).sum() * 1e9
        (loss * 1e30).backward()
    buffer.zero_()
    report = monitor.step(adamw(model), loss)
    assert report.reason == "non-finite gradient"
    assert report.culprit is not None
    assert (report.culprit.phase, report.culprit.reproduced) == ("backward", False)
    monitor.close()


def test_faults_of_pieces_are_added_up_once_a_piece() -> None:
    def fault(name: str, nan: int) -> dict[str, Any]:
        return {"name": name, "kind": "NaN", "nan": nan, "pos_inf": 0, "neg_inf": 1, "of": 64}

    gathered = [[fault("whole", 3), fault("halves", 5)], [fault("whole", 3), fault("halves", 7)]]
    gathered += [[fault("whole", 3), *own[1:]] for own in gathered]  # four ranks, two copies of each half
    gathered = [[dict(one) for one in own] for own in gathered]
    assert _joined(gathered, {"halves": 2, "good": 2}) == [
        fault("whole", 3),
        fault("halves", 12) | {"neg_inf": 2},
    ]


def test_rows_that_fail_leave_no_rank_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("no memory")

    model = net(2)
    Poison(model, "blocks.1.proj")
    monitor = normscale.Monitor(model, runs=tmp_path)
    monkeypatch.setattr(type(monitor.rows), "found", failing)
    (report,) = train(model, monitor, [marked(batches(1)[0])])
    assert not report.applied
    assert report.culprit is None
    monitor.close()


def test_where_training_is_dead_a_replay_is_spared_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, passes = nn.Linear(2, 1), []

    def logged(model: nn.Module, batch: Tensor) -> Tensor:
        passes.append(1)
        return model(batch).log().mean()  # of what is made negative below

    with torch.no_grad():
        model.bias.fill_(-1e3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with normscale.Monitor(model, logged, runs=tmp_path) as monitor:
        for _ in range(9):
            with monitor.micro_batch(batch := torch.ones(1, 2)):
                loss = logged(model, batch)
                loss.backward()
            before = len(passes)
            monitor.step(optimizer, loss)
            replayed = len(passes) > before
            assert replayed == (monitor.in_a_row in (1, 2, 4, 8)), monitor.in_a_row
            optimizer.zero_grad()
    said = capsys.readouterr().err
    for step in (1, 2, 4, 8):
        assert f"step {step} was not applied" in said
    assert "(8 in a row)" in said
    assert "step 5 " not in said
