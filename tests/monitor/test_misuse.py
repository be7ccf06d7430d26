"""Loops that hand over what cannot be used: one line that names it, before anything is changed."""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normscale
from normscale.errors import BadInput
from normscale.monitor.counts import OptimizerCount, scheduler_steps
from tests.monitor.made import Net, Poison, adamw, batches, events, loss_fn, marked, net, record, train


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": 3}, "name=3.*give a text"),
        ({"runs": None}, "runs=None.*give a folder"),
        ({"uri": 3}, "uri=3.*give a store"),
        ({"blocks": 3}, "blocks=3.*names or modules in a list"),
        ({"blocks": nn.Linear(1, 1)}, r"blocks=.*a Linear; give a list of modules"),
        ({"config": [1]}, "config=.*is a list; give settings by name"),
    ],
)
def test_settings_of_another_type_are_refused(options: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=says):
        normscale.Monitor(net(1), **({"runs": tmp_path / "runs"} | options))
    assert not (tmp_path / "runs").exists()


def test_a_lazy_module_is_refused_until_it_has_run(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    with pytest.raises(BadInput, match=r"'0.weight' has no shape yet.*run one forward pass"):
        normscale.Monitor(model, runs=tmp_path)
    model(torch.ones(1, 4))
    normscale.Monitor(model, runs=tmp_path).close()
    model = nn.Sequential(nn.Linear(4, 3), nn.LazyBatchNorm1d(affine=False))  # which has nothing but buffers
    with pytest.raises(BadInput, match=r"'1.running_mean' has no shape yet"):
        normscale.Monitor(model, runs=tmp_path)


def test_settings_of_the_loop_may_hold_tensors(tmp_path: Path) -> None:
    config = {"betas": torch.tensor([0.5, 0.25]), "lr": torch.tensor(0.125), "kind": torch.Tensor}
    found = record(normscale.Monitor(net(1), runs=tmp_path, config=config))
    loop = found.start["config"]["loop"]
    assert (loop["betas"], loop["lr"]) == ([0.5, 0.25], 0.125)


@pytest.mark.parametrize(
    ("loss", "norm", "says"),
    [
        (10**400, None, "the loss is too large"),
        (torch.ones((), dtype=torch.complex64), None, "the loss is complex"),
        (1.0, "x", "grad_norm is a str"),
        (1.0, torch.ones(2), "grad_norm is a tensor of 2 numbers"),
    ],
)
def test_a_step_takes_numbers(loss: Any, norm: Any, says: str, tmp_path: Path) -> None:
    model = net(1)
    monitor = normscale.Monitor(model, runs=tmp_path)
    with monitor.micro_batch():
        loss_fn(model, batches(1)[0]).backward()
    with pytest.raises(BadInput, match=says):
        monitor.step(adamw(model), loss, grad_norm=norm)
    monitor.close()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"a": None}, "'a' is a NoneType"),
        ({"a": "x"}, "'a' is a str"),
        ({"a": torch.ones(2)}, "'a' is a tensor of 2 numbers"),
        ({3: 4}, "the name 3 is a int"),
        ([1], "is a list; give numbers by name"),
    ],
)
def test_what_a_loop_logs_are_numbers_by_name(values: Any, says: str, tmp_path: Path) -> None:
    monitor = normscale.Monitor(net(1), runs=tmp_path)
    with pytest.raises(BadInput, match=says):
        monitor.log(values)
    monitor.log({"right": torch.ones(()), "found": True})
    assert record(monitor).series["user/right"].values == [1.0]


def test_an_optimizer_whose_step_needs_a_closure_is_refused(tmp_path: Path) -> None:
    model = net(1)
    monitor = normscale.Monitor(model, runs=tmp_path)
    with monitor.micro_batch():
        loss = loss_fn(model, batches(1)[0])
        loss.backward()
    with pytest.raises(BadInput, match=r"LBFGS runs the model again .* by a closure"):
        monitor.step(torch.optim.LBFGS(model.parameters()), loss)
    assert monitor.step(adamw(model), loss).applied
    monitor.close()


def test_a_second_optimizer_in_a_window_is_told_that_a_window_has_one(tmp_path: Path) -> None:
    model = net(2)
    first, second = (torch.optim.SGD(block.parameters(), 0.1) for block in model.blocks)
    monitor = normscale.Monitor(model, runs=tmp_path)
    with monitor.micro_batch():
        loss = loss_fn(model, batches(1)[0])
        loss.backward()
    monitor.step(first, loss)
    with pytest.raises(BadInput, match="a window has one optimizer"):
        monitor.step(second, loss)
    with pytest.raises(BadInput, match="no micro-batch since the last step"):
        monitor.step(first, loss)
    monitor.close()


def test_a_loop_that_works_its_scaler_itself_is_told_so(tmp_path: Path) -> None:
    model = net(1)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    monitor = normscale.Monitor(model, runs=tmp_path)

    def backward() -> Tensor:
        with monitor.micro_batch():
            loss = loss_fn(model, batches(1)[0])
            scaler.scale(loss).backward()
        return loss

    assert monitor.step(optimizer, backward(), scaler=scaler).applied
    assert monitor.step(optimizer, backward(), scaler=scaler).applied
    loss = backward()
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(BadInput, match=r"counts 3 steps, and 2 after the last one here; leave scaler\.step"):
        monitor.step(optimizer, loss, scaler=scaler)
    monitor.close()


def test_what_torch_does_not_promise_to_keep_is_missed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(1)
    monitor = normscale.Monitor(model, runs=tmp_path)
    scaler = SimpleNamespace(is_enabled=lambda: True, get_scale=lambda: 2.0)
    with monitor.micro_batch():
        loss_fn(model, batches(1)[0]).backward()
    with pytest.raises(BadInput, match=r"scaler= is a SimpleNamespace that does not keep .* by torch\.amp\.GradScaler"):
        monitor.step(adamw(model), 1.0, scaler=scaler)
    monitor.close()
    monkeypatch.delattr(torch, "_foreach_norm")
    with pytest.raises(BadInput, match=r"torch .* has no torch\._foreach_norm; install torch 2\.11"):
        normscale.Monitor(model, runs=tmp_path)


def test_an_optimizer_that_was_used_before_is_no_disagreement(tmp_path: Path) -> None:
    model = net(1)
    used = adamw(model)
    for _ in range(3):
        loss_fn(model, batches(1)[0]).backward()
        used.step()
    monitor = normscale.Monitor(model, runs=tmp_path, every=1)
    train(model, monitor, batches(2), optimizer=used)
    train(model, monitor, batches(2))  # one of its own
    train(model, monitor, batches(2), optimizer=used)
    for _ in range(2):
        loss_fn(model, batches(1)[0]).backward()
        used.step()  # which nobody was told of
        used.zero_grad()
        train(model, monitor, batches(2), optimizer=used)
    (event,) = events(record(monitor), "ledger")
    assert (event["step"], event["says"]) == (7, "the optimizer counts 8 steps, 7 were applied")


@pytest.mark.parametrize("scheduled", ["applied", "attempted", "micro"])
def test_a_scheduler_that_follows_other_steps_is_told_of(scheduled: str, tmp_path: Path) -> None:
    """PR-017: it advances on micro-steps, or on steps that were not applied (Accelerate#4242)."""
    model = net(1)
    Poison(model, "head")
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.step()
    schedule.step()  # one of its own, to begin with
    monitor = normscale.Monitor(model, runs=tmp_path, every=1)
    data = batches(10)
    data[4] = marked(data[4])
    for start in range(0, 10, 2):
        total = torch.zeros(())
        for batch in data[start : start + 2]:
            with monitor.micro_batch():
                loss = loss_fn(model, batch) / 2
                loss.backward()
            total += loss.detach()
        report = monitor.step(optimizer, total, scheduler=schedule)
        for _ in range({"applied": int(report.applied), "attempted": 1, "micro": 2}[scheduled]):
            schedule.step()
        optimizer.zero_grad()
    told = [(event["step"], event["says"]) for event in events(record(monitor), "ledger")]
    wanted = {
        "applied": [],
        "attempted": [(4, "the scheduler counts 3 steps, 2 were applied before this one")],
        "micro": [(2, "the scheduler counts 2 steps, 1 were applied before this one")],
    }
    assert told == wanted[scheduled]


def test_the_scheduler_that_accelerate_has_prepared_makes_a_step_for_each_rank() -> None:
    own = SimpleNamespace(last_epoch=6)
    assert scheduler_steps(own, 2) == 6
    assert scheduler_steps(SimpleNamespace(scheduler=own, step_with_optimizer=True, split_batches=False), 2) == 3
    assert scheduler_steps(SimpleNamespace(scheduler=own, step_with_optimizer=True, split_batches=True), 2) == 6
    assert scheduler_steps(SimpleNamespace(scheduler=own, step_with_optimizer=False, split_batches=False), 2) == 6


def test_something_that_counts_no_steps_is_no_scheduler(tmp_path: Path) -> None:
    monitor = normscale.Monitor(net(1), runs=tmp_path)
    with pytest.raises(BadInput, match=r"scheduler= is a Custom, which counts no steps; leave it out"):
        monitor.step(adamw(monitor.inner), 1.0, scheduler=Custom(torch.ones(1)))
    monitor.close()


def test_a_count_that_lies_on_a_gpu_is_compared_on_measured_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a fused AdamW: the host does not wait for it."""
    monkeypatch.setattr("normscale.monitor.counts.near", lambda step: False)
    model = net(1)
    optimizer = adamw(model)
    monitor = normscale.Monitor(model, runs=tmp_path, every=2)
    train(model, monitor, batches(2), optimizer=optimizer)
    loss_fn(model, batches(1)[0]).backward()
    optimizer.step()  # which nobody was told of
    optimizer.zero_grad()
    train(model, monitor, batches(4), optimizer=optimizer)
    (event,) = events(record(monitor), "ledger")
    assert (event["step"], event["says"]) == (4, "the optimizer counts 5 steps, 4 were applied")


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("untold", [False, True])
def test_steps_in_which_the_first_parameter_has_no_gradient_are_no_disagreement(
    untold: bool, near: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam counts by parameter, and passes those over that have none; no parameter here is used in every step."""
    if not near:
        monkeypatch.setattr("normscale.monitor.counts.near", lambda step: False)
    model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    optimizer = adamw(model)
    monitor = normscale.Monitor(model, runs=tmp_path, every=1, blocks=())
    for step, batch in enumerate(batches(8), start=1):
        with monitor.micro_batch():
            loss = model[step % 2](batch).mean() * (float("nan") if step == 7 else 1)
            loss.backward()
        if untold and step == 6:
            optimizer.step()
        assert monitor.step(optimizer, loss).applied == (step != 7)
        optimizer.zero_grad()
    told = [(event["step"], event["says"]) for event in events(record(monitor), "ledger")]
    assert told == ([(6, "the optimizer counts 7 steps, 6 were applied")] if untold else [])


def test_an_optimizer_whose_parameters_never_show_a_gradient_is_compared_as_it_counts() -> None:
    """As one of DeepSpeed behind Accelerate, which has stepped already."""
    own = nn.Parameter(torch.zeros(1))
    optimizer = SimpleNamespace(param_groups=[{"params": [own]}], state={own: {"step": 0}})
    count = OptimizerCount(torch.device("cpu"))
    for step in (1, 2, 3):
        optimizer.state[own]["step"] = step
        count.check(optimizer, scaled=False)
        assert count.since(optimizer, step, True) == step


class Custom:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class CustomBlock(nn.Linear):
    def forward(self, x: Any) -> Any:
        return Custom(super().forward(x.x if isinstance(x, Custom) else x))


def test_blocks_that_return_a_class_of_their_own_are_told_of_by_its_name(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([CustomBlock(4, 4), CustomBlock(4, 4)])

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return x.x

    model = Model()
    monitor = normscale.Monitor(model, runs=tmp_path)
    with pytest.raises(
        BadInput, match=r"2 blocks .* return a Custom, in which no tensor of real numbers is found.*Monitor\(blocks="
    ):
        train(model, monitor, batches(1))
    monitor.close()


def test_lists_of_parameters_are_no_blocks(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(2))
            self.nested = nn.ModuleList(nn.ParameterList([nn.Parameter(torch.ones(4))]) for _ in range(2))
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            for scale in (*self.scales, *(inner[0] for inner in self.nested)):
                x = x * scale
            return self.linear(x)  # type: ignore[no-any-return]

    model = Model()
    monitor = normscale.Monitor(model, runs=tmp_path)
    assert monitor.blocks == ["linear"]
    assert train(model, monitor, batches(1))[0].applied
    monitor.close()


def test_a_folder_that_was_deleted_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    model = net(1)
    monitor = normscale.Monitor(model, runs=tmp_path)
    train(model, monitor, batches(1))
    shutil.rmtree(monitor.run_dir)
    monitor.close()
    said = capsys.readouterr().err
    assert str(monitor.run_dir) in said
    assert "the end of the run is not recorded (it was deleted during the run)" in said
    assert "is shown by" not in said


def test_a_micro_batch_that_failed_is_taken_out_of_its_window(tmp_path: Path) -> None:
    """As an OutOfMemoryError that the loop catches, going on with a smaller batch."""

    class Failing(Net):
        failing = False

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if self.failing:
                raise torch.OutOfMemoryError("no room")
            return x

    profiles = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = Failing(2)
        for block in model.blocks:
            block.drop.p = 0.0
        monitor = normscale.Monitor(model, loss_fn, runs=tmp_path)
        total = torch.zeros(())
        for batch in batches(2):
            for model.failing in (True, False) if fails else (False,):
                try:
                    with monitor.micro_batch(batch):
                        loss = loss_fn(model, batch)
                        loss.backward()
                    total += loss.detach()
                except torch.OutOfMemoryError:
                    assert model.failing
        assert len(monitor.provenance.kept) == monitor._micro_batches == 2
        monitor.step(adamw(model), total)
        profiles.append(record(monitor).profiles)
    for name in profiles[0]:
        torch.testing.assert_close(
            torch.from_numpy(profiles[1][name].data), torch.from_numpy(profiles[0][name].data), equal_nan=True
        )


def test_what_the_store_lacks_at_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow:
        def __init__(self, runs: Path, uri: str) -> None:
            assert runs == tmp_path

        def finish(self, timeout: float, stopped: bool) -> str:
            return f"MLflow does not show everything yet, {stopped}"

    monkeypatch.setattr("normscale.tracking.sink_process.Sink", Slow)
    for stopped in (False, True):
        monitor = normscale.Monitor(net(1), runs=tmp_path, uri=f"sqlite:///{tmp_path}/mlflow.db")
        if stopped:
            with pytest.raises(KeyboardInterrupt), monitor:
                raise KeyboardInterrupt
        monitor.close()
        assert f"normscale: MLflow does not show everything yet, {stopped}" in capsys.readouterr().err


class Failing(torch.optim.SGD):
    """Fails in its third step."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise KeyError("on purpose")
        return super().step(closure)


def test_a_window_whose_optimizer_fails_is_over(tmp_path: Path) -> None:
    """The next one has micro-batches of its own, and what is measured is of these alone."""
    model = net(2)
    for block in model.blocks:
        block.drop.p = 0.0
    monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, every=3)
    optimizer, kept, rms = Failing(model.parameters(), 0.1), [], []
    model.blocks[1].register_forward_hook(lambda m, args, y: rms.append(float(y.detach().square().mean().sqrt())))
    for batch in batches(5):
        optimizer.zero_grad()
        with monitor.micro_batch(batch):
            loss = loss_fn(model, batch)
            loss.backward()
        kept.append(len(monitor.provenance.kept))
        with suppress(KeyError):
            monitor.step(optimizer, loss)
        assert monitor.provenance.kept == []
    assert kept == [1] * 5
    assert (monitor.steps, monitor.applied) == (4, 4)
    found = record(monitor)
    assert found.profiles["stream_rms"].steps == [1, 3]
    assert found.profiles["stream_rms"].data[:, 1] == pytest.approx([rms[0], rms[3]], rel=1e-6)
    assert events(found, "ledger") == []
