"""Loops as people write them in one process, their mistakes, and what a monitor must not change."""

import errno
import io
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normscale
from normscale.cli import main
from normscale.errors import BadInput, NonFiniteStop, StoreError
from normscale.tracking.mlflow_artifacts import bad_events
from tests.monitor.made import Poison, adamw, batches, events, loss_fn, marked, net, record, train

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def plain(precision: str, checkpointed: str, accumulate: int, monitored: bool, runs: Path) -> list[Tensor]:
    """Returns the losses and the weights of 50 steps, with all that a monitor measures or as if there were none."""
    model = net(3)
    model.checkpointed = checkpointed
    torch.manual_seed(4)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=20) if precision == "fp16" else None
    fixed = batches(1, seed=9)[0]
    monitor = normscale.Monitor(model, loss_fn, runs=runs, every=3, update_batch=fixed) if monitored else None
    kept = []
    data = batches(50 * accumulate)
    for start in range(0, len(data), accumulate):
        total = torch.zeros(())
        for batch in data[start : start + accumulate]:
            if monitor is not None:
                monitor.micro_batch(batch)
            with nullcontext() if precision == "fp32" else torch.autocast("cpu", PRECISIONS[precision]):
                loss = loss_fn(model, batch) / accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
            total += loss.detach()
        if monitor is not None:
            assert monitor.step(optimizer, total, scaler=scaler).applied
        elif scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        kept.append(total)
    if monitor is not None:
        assert {"stream_rms", "stream_grad_norm", "grad_norm", "update_rel", "headroom_bits"} <= set(
            (found := record(monitor)).profiles
        )
        assert len(found.series["update"].steps) == 17
    return [*kept, *(p.detach() for p in model.parameters()), torch.rand(2)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("checkpointed", "accumulate"), [("", 1), ("plain", 1), ("", 2), ("plain", 2)])
def test_losses_weights_and_random_numbers_are_the_same_to_the_bit(
    precision: str, checkpointed: str, accumulate: int, tmp_path: Path
) -> None:
    bare = plain(precision, checkpointed, accumulate, False, tmp_path)
    seen = plain(precision, checkpointed, accumulate, True, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(seen, bare, strict=True))


@pytest.mark.parametrize("bf16", [False, True])
def test_clipping_is_that_of_torch(bf16: bool, tmp_path: Path) -> None:
    weights = []
    for monitored in (False, True):
        model = net(3).to(torch.bfloat16 if bf16 else torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(2)
        monitor = normscale.Monitor(model, runs=tmp_path, clip=0.1) if monitored else None
        for batch in batches(5):
            batch = batch.to(model.embed.weight.dtype)
            if monitor is not None:
                monitor.micro_batch(batch)
            loss = loss_fn(model, batch)
            loss.backward()
            if monitor is not None:
                report = monitor.step(optimizer, loss)
                assert report.grad_norm is not None
                assert report.grad_norm > 0.1
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            optimizer.zero_grad()
        weights.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_norm_that_the_loop_has_measured_is_taken(tmp_path: Path) -> None:
    model = net(2)
    optimizer = adamw(model)
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, every=1)
    Poison(model, "blocks.1.proj")
    reports = []
    for batch in (batches(1)[0], marked(batches(1)[0])):
        with monitor.micro_batch(batch):
            loss = loss_fn(model, batch)
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        reports.append(monitor.step(optimizer, loss, grad_norm=norm))
        optimizer.zero_grad()
    assert reports[0].applied
    assert reports[0].grad_norm is not None
    assert reports[0].grad_norm > 0.01
    assert not reports[1].applied
    assert reports[1].culprit is not None
    assert reports[1].culprit.module == "blocks.1.proj"
    with monitor.micro_batch(batch := batches(1)[0]):
        loss_fn(model, batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert monitor.step(optimizer, float("nan"), grad_norm=norm).reason == "non-finite loss"
    found = record(monitor)
    assert events(found, "nonfinite")[0]["parameters"] == []  # clipped by then: they would tell wrong
    assert found.series["grad_norm_clipped"].steps == [1]
    assert found.series["grad_norm_clipped"].values[0] == pytest.approx(0.01, rel=1e-3)
    assert "norm_clipped" not in found.ledger[0]


def test_a_norm_that_the_loop_has_measured_is_not_the_one_after_it_clipped(tmp_path: Path) -> None:
    model = net(2)
    monitor = normscale.Monitor(model, runs=tmp_path, blocks=())  # whose gradients nobody looks at
    with monitor.micro_batch():
        loss = loss_fn(model, batches(1)[0])
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    monitor.step(adamw(model), loss, grad_norm=norm)
    found = record(monitor)
    assert found.series["grad_norm"].values == [pytest.approx(float(norm))]
    assert "grad_norm_clipped" not in found.series
    assert "norm_clipped" not in found.ledger[0]


@pytest.mark.parametrize("norm", [2.0, torch.tensor(2.0)])
def test_who_clips_is_the_loop_or_the_monitor(norm: Any, tmp_path: Path) -> None:
    model = net(2)
    optimizer = adamw(model)
    monitor = normscale.Monitor(model, runs=tmp_path, clip=0.01)
    with monitor.micro_batch():
        loss = loss_fn(model, batches(1)[0])
        loss.backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(BadInput, match=r"grad_norm= with Monitor\(clip=0.01\).*leave one of them out"):
        monitor.step(optimizer, loss, grad_norm=norm)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert monitor.step(optimizer, loss, grad_norm=-norm).applied  # which says nothing
    assert record(monitor).series["grad_norm_clipped"].values[0] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(("bad", "reason"), [(False, "norm overflow"), (True, "non-finite gradient")])
def test_a_norm_of_the_loop_that_overflows_is_told_from_a_bad_gradient(bad: bool, reason: str, tmp_path: Path) -> None:
    """Clipping by it has made zeros of entries that were finite, and NaN of one that was not."""
    model = nn.Linear(2, 2)
    monitor = normscale.Monitor(model, runs=tmp_path, blocks=())
    batch = torch.full((1, 2), 1e30)
    with monitor.micro_batch(batch):
        loss = model(batch).sum()
        loss.backward()
    if bad:
        assert model.bias.grad is not None
        model.bias.grad[1] = float("inf")
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.isinf()
    report = monitor.step(torch.optim.SGD(model.parameters(), 1e-40), loss, grad_norm=norm)
    assert report.reason == reason
    if not bad:
        assert report.culprit is not None
        assert (report.culprit.phase, report.culprit.tensor) == ("norm", "gradient norm")
        assert "each of the 6 entries" in report.culprit.note
    monitor.close()


def test_a_gradient_scaler_is_worked_for_the_loop(tmp_path: Path) -> None:
    """An overflow halves the scale and is no fault of the model; a NaN at a scale of 1 is."""
    model = net(2)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, every=1, on_nonfinite="stop")
    reports = []
    for _ in range(4):
        batch = 1e9 * batches(1)[0]
        with monitor.micro_batch(batch):
            loss = loss_fn(model, batch)
            scaler.scale(loss).backward()
        reports.append(monitor.step(optimizer, loss, scaler=scaler))
        optimizer.zero_grad()
    assert [report.reason for report in reports][:2] == ["loss scale overflow"] * 2
    assert scaler.get_scale() == 2.0 ** (100 - sum(report.reason == "loss scale overflow" for report in reports))
    found = record(monitor)
    assert found.series["loss_scale"].values[:2] == [2.0**100, 2.0**99]
    assert events(found, "nonfinite") == []
    assert found.series["nonfinite"].values == [0.0] * 4
    assert not any(report.applied for report in reports)
    assert (found.end["outcome"], found.end["exit_code"], found.summary["bad_step"]) == ("finished", 0, -1)
    assert found.summary["skipped"] == 4
    assert bad_events(found) == []


def test_a_run_of_bad_steps_alone_ends_as_one_that_is_not_finite(tmp_path: Path) -> None:
    model = net(2)
    Poison(model, "blocks.1")
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path)
    train(model, monitor, list(map(marked, batches(2))))
    found = record(monitor)
    assert (found.end["outcome"], found.end["exit_code"], found.summary["bad_step"]) == ("nan", 3, 1)


class Floor(torch.amp.GradScaler):
    """A loss scale that does not fall below 8."""

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        super().update(max(8.0, self.get_scale()))


class Static(torch.amp.GradScaler):
    """A loss scale that stays what it is."""

    def update(self, new_scale: Any = None) -> None:
        super().update(self.get_scale())


@pytest.mark.parametrize(("kind", "stops_at"), [(torch.amp.GradScaler, 7), (Floor, 4), (Static, 3)])
def test_an_overflow_that_does_not_lower_the_scale_is_the_models(kind: Any, stops_at: int, tmp_path: Path) -> None:
    """PR-015: from 2^4, so that four steps are the scale's, or one, or none; three more end the run."""
    model = net(2)
    Poison(model, "blocks.1.proj", float("inf"), backward=True, always=True)
    scaler = kind("cpu", init_scale=2.0**4)
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, on_nonfinite=3)
    optimizer, reasons = adamw(model), []

    def loop() -> None:
        for batch in batches(10):
            with monitor.micro_batch(batch):
                loss = loss_fn(model, batch)
                scaler.scale(loss).backward()
            reasons.append(monitor.step(optimizer, loss, scaler=scaler).reason)
            optimizer.zero_grad()

    with pytest.raises(NonFiniteStop, match=rf"stopped at step {stops_at}, 3 in a row: .*blocks\.1\.proj") as stopped:
        loop()
    assert stopped.value.exit_code == 3
    assert reasons == ["loss scale overflow"] * (stops_at - 3) + ["non-finite gradient"] * 2
    found = record(monitor)
    assert found.end is not None
    assert (found.end["outcome"], len(events(found, "nonfinite"))) == ("nan", 3)


def test_gradients_with_a_scale_are_recorded_without_it(tmp_path: Path) -> None:
    norms = []
    for scale in (None, 1024.0):
        model = net(2)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1) if scale else None
        torch.manual_seed(3)
        monitor = normscale.Monitor(model, runs=tmp_path)
        batch = batches(1)[0]
        with monitor.micro_batch(batch):
            loss = loss_fn(model, batch)
            (scaler.scale(loss) if scaler else loss).backward()
        assert monitor.step(adamw(model), loss, scaler=scaler).applied
        assert scaler is None or scaler.get_scale() == 2048.0  # one good step, and it grows
        norms.append(record(monitor).profiles)
    for name in ("stream_grad_norm", "grad_norm", "update_rel"):
        torch.testing.assert_close(*(torch.from_numpy(found[name].data) for found in norms), rtol=1e-5, atol=0)


class Fake:
    """An engine with nothing to show, as DeepSpeed's is from stage 1 on."""

    def __init__(self, model: nn.Module, norm: Any) -> None:
        self.module, self.norm, self.global_steps, self.applied = model, norm, 0, True
        self.optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def zero_optimization_stage(self) -> int:
        return 2

    def bfloat16_enabled(self) -> bool:
        return False

    fp16_enabled = bfloat16_enabled

    def gradient_clipping(self) -> float:
        return 0.0

    def is_gradient_accumulation_boundary(self) -> bool:
        return True

    def step(self) -> None:
        for p in self.module.parameters():
            p.grad = None
        self.global_steps += 1

    def was_step_applied(self) -> bool:
        return self.applied

    def get_global_grad_norm(self) -> Any:
        return self.norm


@pytest.mark.parametrize(
    ("norm", "applied", "recorded"),
    [(2.5, True, [2.5]), (None, True, None), (-1, False, None), (float("inf"), False, None), (None, False, None)],
)
def test_what_an_engine_does_not_show_is_missing_and_not_zero(
    norm: Any, applied: bool, recorded: list[float] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """composer#1501, and the sentinels of norms."""
    model = net(2)
    engine = Fake(model, norm)
    engine.applied = applied
    monitor = normscale.Monitor(model, runs=tmp_path, every=1)
    for batch in batches(2):
        with monitor.micro_batch(batch):
            loss = loss_fn(model, batch)
            loss.backward()
        for p in model.parameters():
            p.grad = None
        report = monitor.step(engine, loss)
    assert report.applied == applied
    found = record(monitor)
    assert "grad_norm" not in found.profiles
    assert (found.profiles["stream_grad_norm"].data > 0).all()
    assert [event["what"] for event in events(found, "unavailable")].count("grad_norm") == 1
    assert capsys.readouterr().err.count("shows no gradients") == 1
    series = found.series.get("grad_norm")
    if recorded:
        assert series is not None
        assert series.values == [2.5, 2.5]
    else:
        assert series is None or not any(value == value and abs(value) != float("inf") for value in series.values)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda m: m.step(adamw(m.inner), torch.ones(())), "no micro-batch since the last step"),
        (lambda m: m.step(adamw(m.inner), None), "the loss is a NoneType"),
        (lambda m: m.step(adamw(m.inner), torch.ones(2)), "the loss is a tensor of 2 numbers"),
        (lambda m: m.step(torch.ones(()), adamw(m.inner)), "a Tensor is no optimizer"),
    ],
)
def test_calls_that_make_no_sense_say_why(make: Any, says: str, tmp_path: Path) -> None:
    monitor = normscale.Monitor(net(1), runs=tmp_path)
    with pytest.raises(BadInput, match=says):
        make(monitor)
    monitor.close()


def test_a_step_without_gradients_or_without_a_forward_says_so(tmp_path: Path) -> None:
    model = net(1)
    monitor = normscale.Monitor(model, runs=tmp_path)
    with monitor.micro_batch():
        pass
    with pytest.raises(BadInput, match=r"none of the 1 blocks \('blocks.0'.* has reported a forward pass"):
        monitor.step(adamw(model), 1.0)
    with monitor.micro_batch():
        loss = loss_fn(model, batches(1)[0])
    with pytest.raises(BadInput, match=r"no parameter of the optimizer has a gradient; call loss\.backward"):
        monitor.step(adamw(model), loss)
    loss.backward()
    assert monitor.step(adamw(model), loss).applied
    monitor.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 0}, "every=0"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore'"),
        ({"on_nonfinite": True}, "on_nonfinite=True"),
        ({"clip": -1}, "clip=-1"),
        ({"stalled": 0}, "stalled=0"),
        ({"spike_window": 1}, "spike_window=1.*2 or more"),
        ({"spike_sigmas": 0}, "spike_sigmas=0"),
        ({"loss_fn": 3}, "loss_fn"),
        ({"name": "///"}, "name='///'"),
        ({"blocks": "nothing"}, "matches no module"),
    ],
)
def test_settings_that_cannot_be_are_refused_and_leave_nothing(options: Any, says: str, tmp_path: Path) -> None:
    model = net(1)
    with pytest.raises(BadInput, match=says):
        normscale.Monitor(model, runs=tmp_path / "runs", **options)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(BadInput, match="is a str"):
        normscale.Monitor("gpt2", runs=tmp_path / "runs")  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_attached(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = net(1)
    with pytest.raises(StoreError, match=r"Monitor: cannot write .*choose another folder: Monitor\(runs=<folder>\)"):
        normscale.Monitor(model, runs=tmp_path / "file")
    assert not any(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_in_mid_run_costs_records_and_one_warning(
    fault: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = net(2)
    monitor = normscale.Monitor(model, runs=tmp_path, every=1)
    train(model, monitor, batches(1))

    def failing(*_: Any) -> int:
        raise OSError(fault, os.strerror(fault))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing)
        assert all(report.applied for report in train(model, monitor, batches(3)))
    train(model, monitor, batches(1))
    assert record(monitor).series["loss_train"].steps == [1, 5]
    assert capsys.readouterr().err.count("a record was lost") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_where_nothing_can_be_said_training_goes_on_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost record, steps that were not applied, a probe that fails, the end: each would be said on stderr."""

    def failing(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = net(2)
    Poison(model, "blocks.1")
    with io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True) as full:
        monkeypatch.setattr(sys, "stderr", full)
        monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, every=1, stalled=2)
        monkeypatch.setattr(monitor.depth.rows, "read", lambda values: 1 / 0)
        reports = train(model, monitor, [*batches(1), *map(marked, batches(2)), *batches(1)])
        monkeypatch.setattr(os, "write", failing)
        train(model, monitor, batches(1))
        monitor.close()
        monkeypatch.undo()
    assert [report.applied for report in reports] == [True, False, False, True]
    assert {event["event"] for event in record(monitor).events} >= {"nonfinite", "stalled", "probe_off"}


def test_the_loops_own_numbers_and_settings_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = net(2)
    with normscale.Monitor(model, runs=tmp_path, name="my run", config={"lr": 1e-3, "model": "tiny"}) as monitor:
        train(model, monitor, batches(2))
        monitor.log({"accuracy": 0.5})
    assert monitor.run_id.startswith("my-run-")
    found = record(monitor)
    assert found.series["user/accuracy"].values == [0.5]
    assert found.start["config"]["loop"]["lr"] == 1e-3
    assert found.summary["applied"] == 2
    assert main(["show", "latest", "--runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert monitor.run_id in shown
    assert "diverged" not in shown
    assert "stream" in shown


def test_two_monitored_runs_can_be_compared_and_go_to_mlflow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import mlflow

    from normscale.tracking.mlflow_sink import sync

    ids = []
    for lr in (1e-2, 1e-3):
        model = net(2)
        with normscale.Monitor(model, runs=tmp_path / "runs", every=1, config={"lr": lr}) as monitor:
            train(model, monitor, batches(3), optimizer=adamw(model, lr))
        ids.append(monitor.run_id)
    assert main(["diff", *ids, "--runs", str(tmp_path / "runs")]) == 0
    assert "loop.lr" in capsys.readouterr().out
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert sync(tmp_path / "runs", uri).ok
    client = mlflow.MlflowClient(uri)
    found = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert {run.data.tags["normscale.run"] for run in found} == set(ids)
    assert all(run.data.metrics["1-loss/train"] > 0 for run in found)
    assert {run.info.status for run in found} == {"FINISHED"}


def test_normscale_itself_imports_no_torch() -> None:
    code = "import sys, normscale; assert 'torch' not in sys.modules; normscale.Monitor; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code + "; assert 'torch._dynamo' not in sys.modules"], check=True)
    with pytest.raises(AttributeError, match="no attribute 'Moniter'"):
        normscale.Moniter  # type: ignore[attr-defined]  # noqa: B018
    assert "Monitor" in dir(normscale)


def test_accelerates_way_to_accumulate(tmp_path: Path) -> None:
    """accelerate#641 and #963: norms and the schedule follow windows, and windows that were applied."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    model = net(2)
    for block in model.blocks:
        block.drop.p = 0.0
    data = batches(16)
    data[9] = marked(data[9])
    Poison(model, "blocks.1.proj")
    try:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        _, prepared, scheduler = accelerator.prepare(model, optimizer, schedule)
        monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, every=1)
        reports = []
        whole = net(2)
        for block in whole.blocks:
            block.drop.p = 0.0
        loss_fn(whole, torch.cat(data[:4])).backward()
        wanted = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None])
        for batch in data:
            with accelerator.accumulate(model), monitor.micro_batch(batch):
                loss = loss_fn(model, batch)
                accelerator.backward(loss)
                reports.append(monitor.step(prepared, loss))
                if reports[-1].applied:
                    scheduler.step()
                prepared.zero_grad()
    finally:
        for state in (AcceleratorState, PartialState):
            state._reset_state()
        GradientState._reset_state()
    whole_windows = [report for report in reports if report.reason != "accumulating"]
    assert [report.applied for report in whole_windows] == [True, True, False, True]
    assert [report.step for report in reports] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert whole_windows[0].grad_norm == pytest.approx(float(wanted), rel=1e-5)
    assert whole_windows[2].culprit is not None
    assert whole_windows[2].culprit.micro_batch == 1
    found = record(monitor)
    assert found.series["grad_norm"].steps == [1, 2, 3, 4]
    assert found.series["lr"].values == pytest.approx([0.1, 0.05, 0.1 / 3, 0.1 / 3])


def test_the_last_window_may_be_shorter(tmp_path: Path) -> None:
    """PR-016 (accelerate#641): windows of 4 and 10 micro-batches; norms are of whole windows, and clipped once."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    data = batches(10, rows=1)
    model, twin = (net(2) for _ in range(2))
    for block in [*model.blocks, *twin.blocks]:
        block.drop.p = 0.0
    try:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = torch.utils.data.DataLoader([batch[0] for batch in data], batch_size=1)  # type: ignore[arg-type]
        _, prepared, loader = accelerator.prepare(model, optimizer, loader)
        monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, clip=0.01)
        for batch in loader:
            with accelerator.accumulate(model), monitor.micro_batch(batch):
                loss = loss_fn(model, batch)
                accelerator.backward(loss)
                monitor.step(prepared, loss)
                prepared.zero_grad()
    finally:
        for state in (AcceleratorState, PartialState):
            state._reset_state()
        GradientState._reset_state()
    own, wanted = torch.optim.SGD(twin.parameters(), 0.1), []
    for start in (0, 4, 8):
        window = data[start : start + 4]
        (loss_fn(twin, torch.cat(window)) * len(window) / 4).backward()
        wanted.append(float(torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01)))
        own.step()
        own.zero_grad()
    found = record(monitor)
    assert found.summary["steps"] == 3
    assert [row["norm"] for row in found.ledger] == pytest.approx(wanted, rel=1e-5)


def test_sparse_and_mixed_gradients_are_checked(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 3, sparse=True)
            self.narrow, self.wide = nn.Parameter(torch.ones(3).bfloat16()), nn.Parameter(torch.ones(3).double())
            self.unused, self.empty = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0))

        def forward(self, rows: Tensor) -> Tensor:
            return (self.table(rows) * self.narrow.float() * self.wide).sum() + self.empty.sum()

    for bad, applied in ((1.0, True), (float("nan"), False)):
        for every in (1, 2):  # the norm, or the flag
            model = Mixed()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            monitor = normscale.Monitor(model, runs=tmp_path, blocks=["table"], every=every)
            for factor in (1.0, bad):
                with monitor.micro_batch():
                    loss = model(torch.tensor([1, 1, 3]))
                    (loss * factor).backward()
                report = monitor.step(optimizer, 1.0)
                optimizer.zero_grad()
            assert report.applied == applied
            assert (record(monitor).profiles["grad_norm"].data[0] > 0).all()


def test_a_loss_that_is_not_finite_while_gradients_are_is_told_of(tmp_path: Path) -> None:
    """As a rank of DDP may have it; one process would not apply the step."""
    model = net(1)
    monitor = normscale.Monitor(model, runs=tmp_path, every=1)
    monitor.losses.bad = [3, 4]
    train(model, monitor, batches(1))
    (event,) = events(record(monitor), "loss_nonfinite")
    assert (event["count"], event["first_step"]) == (2, 3)


@pytest.mark.slow
def test_records_go_to_mlflow_while_training(tmp_path: Path) -> None:
    import mlflow

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    model = net(2)
    with normscale.Monitor(model, runs=tmp_path / "runs", every=1, uri=uri) as monitor:
        train(model, monitor, batches(3))
    client = mlflow.MlflowClient(uri)
    found = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert [run.data.tags["normscale.run"] for run in found] == [monitor.run_id]
    assert found[0].info.status == "FINISHED"
    with pytest.raises(StoreError, match="uri"):
        normscale.Monitor(net(1), runs=tmp_path / "other", uri="nowhere://x")
    assert not (tmp_path / "other").exists()
