"""What a measured step's probes have sent may come a step later, as from a GPU: the records are the same.

Here a CPU sends it so: `late` has every copy to the host wait until it is asked for.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import normscale
from normscale.probes import sending
from normscale.probes.guard import Guard
from normscale.probes.stopwatch import Stopwatch
from normscale.tracking.reader import RunRecord, read_run
from normscale.tracking.record import PROBE_S
from normscale.train.loop import Trainer
from normscale.train.recording import Recorder
from normscale.train.run import run
from tests.monitor import made
from tests.probes.test_guard import Failing, Other
from tests.train.test_run import config

TIMES = {"tokens_s", "tflops_s", "mfu", "seconds", "train_seconds", "thread_s", "checkpoint_s"}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Switches it on and off."""

    def switch(on: bool) -> None:
        if on:
            monkeypatch.setitem(sending.COPIED, "cpu", lambda device: lambda: None)
        else:
            monkeypatch.delitem(sending.COPIED, "cpu", raising=False)

    return switch


def told(found: RunRecord) -> dict[str, Any]:
    """Returns all that a run's records say, but for times."""
    series = {name: (each.steps, each.values) for name, each in found.series.items() if name not in TIMES}
    events = {i: {k: v for k, v in event.items() if k not in ("t", "seconds")} for i, event in enumerate(found.events)}
    ledger = {row["step"]: row for row in found.ledger}
    summary = {k: v for k, v in found.summary.items() if k not in TIMES and not k.endswith(PROBE_S)}
    summary = {k: v for k, v in summary.items() if "memory" not in k and not k.startswith("mfu")}
    profiles = {name: [*zip(each.steps, each.data.tolist(), strict=True)] for name, each in found.profiles.items()}
    return {"series": series, "events": events, "summary": summary, "profiles": profiles, "ledger": ledger}


def differences(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """Returns the names of what is not the same in both; NaN is like NaN."""
    parts = [(part, name) for part in one for name in {**one[part], **two[part]}]
    return [f"{part} {name}" for part, name in parts if repr(one[part].get(name)) != repr(two[part].get(name))]


BAD = {"on_nonfinite": "skip", "steps": 6, "batch": 4, "eval_every": 3, "eval_batches": 2}
FP16 = {"compute": "fp16", "loss_scale": {"initial": 2.0**24}}


@pytest.mark.parametrize(
    "parts",
    [
        {"probes": {"every": 1, "epsilon": {"every": 2}, "update": {"every": 1}, "layers": True}},
        {"probes": {"every": 2}},
        {"probes": {"every": 1}, "train": BAD},
        {"probes": {"every": 2}, "train": BAD, "precision": FP16},
        {"probes": {"every": 3}, "checkpoint": {"every": 2}},
    ],
    ids=["every step", "every other", "not finite", "fp16", "checkpoints"],
)
def test_a_run_is_recorded_the_same(
    parts: dict[str, Any], late: Callable[[bool], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parts.get("train") is BAD and "precision" not in parts:
        monkeypatch.setattr(Trainer, "step", spoilt(Trainer.step))
    found = []
    for on in (False, True):
        late(on)
        result = run(config(tmp_path / str(on), **parts))
        found.append(told(read_run(result.run_dir)))
    assert found[0]["profiles"]
    assert differences(*found) == []


def spoilt(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step whose third has a weight that is not finite, as its fourth has."""

    def spoil(self: Trainer, window: Any, recorder: Recorder) -> Any:
        bias = self.engine.inner.sublayers()[1].branch.up.bias.data
        saved = bias.clone()
        if self.attempted in (2, 3):
            bias[0] = math.inf
        result = step(self, window, recorder)
        if not result.applied:
            bias.copy_(saved)
        return result

    return spoil


@pytest.mark.parametrize("every", [1, 3])
def test_a_monitored_run_is_recorded_the_same(every: int, late: Callable[[bool], None], tmp_path: Path) -> None:
    found = []
    for on in (False, True):
        late(on)
        model = made.net()
        made.Poison(model, "blocks.1")
        data = made.batches(8)
        data[4] = made.marked(data[4])
        monitor = normscale.Monitor(model, made.loss_fn, runs=tmp_path, every=every, update_batch=data[0])
        made.train(model, monitor, data)
        found.append(told(made.record(monitor)))
    assert len(found[0]["profiles"]["stream_rms"]) > 2
    assert [event["step"] for event in found[0]["events"].values() if event["event"] == "nonfinite"] == [5]
    assert differences(*found) == []


@pytest.mark.parametrize("on", [True, False])
def test_the_ledger_has_the_loss_scale_after_each_step(on: bool, late: Callable[[bool], None], tmp_path: Path) -> None:
    late(on)
    model, scaler = made.net(), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    monitor = normscale.Monitor(model, runs=tmp_path, every=3)
    optimizer = made.adamw(model)
    for i, batch in enumerate(made.batches(6)):
        monitor.micro_batch(batch)
        loss = made.loss_fn(model, batch) * (math.nan if i == 4 else 1.0)
        scaler.scale(loss).backward()
        monitor.step(optimizer, torch.zeros(()) if i == 4 else loss, scaler=scaler)
        optimizer.zero_grad()
    found = made.record(monitor)
    scales = [4.0, 4.0, 8.0, 8.0, 16.0, 8.0, 8.0]
    assert [(row["scale_before"], row["scale_after"]) for row in found.ledger] == list(pairwise(scales))
    assert [row["reason"] for row in found.ledger] == [None] * 4 + ["loss scale overflow", None]
    assert found.series["loss_scale"].values == [4.0, 8.0, 16.0, 8.0]


@pytest.mark.parametrize("evaluated", [True, False])
def test_what_passes_took_is_left_out_of_the_time_it_was_in(
    evaluated: bool, late: Callable[[bool], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is known when the numbers have come: in the next step, or before an evaluation that comes first."""
    late(True)
    event = SimpleNamespace(query=lambda: True, elapsed_time=lambda end: 1e6)

    def timing(self: Stopwatch, device: torch.device) -> Any:
        self._open.append((event, event))
        return nullcontext()

    evaluate, waiting = Trainer.evaluate, []

    def noted(self: Trainer, batches: Any) -> float:
        waiting.append(self._unwritten)
        return evaluate(self, batches)

    monkeypatch.setattr(Stopwatch, "timing", timing)
    monkeypatch.setattr(Trainer, "evaluate", noted)
    train = {"steps": 4, "batch": 4, "eval_every": int(evaluated), "eval_batches": 2}
    found = run(config(tmp_path, train=train, probes={"every": 1, "update": {"every": 1}})).summary
    assert found["update_probe_s"] == 5000  # the first before all steps
    steps = 0 if evaluated else 4  # of the last step's they come before the evaluation at the end
    assert -1000 * steps <= found["train_seconds"] < 100 - 1000 * steps
    assert waiting == [None] * len(waiting)


@pytest.mark.parametrize("on", [True, False])
def test_an_error_in_the_next_step_loses_nothing(
    on: bool, late: Callable[[bool], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late(on)
    forward = Trainer._forward_backward

    def fail(self: Trainer, *arguments: Any) -> Any:
        if self.attempted == 3:
            raise ZeroDivisionError
        return forward(self, *arguments)

    monkeypatch.setattr(Trainer, "_forward_backward", fail)
    with pytest.raises(ZeroDivisionError):
        run(config(tmp_path, probes={"every": 2}))
    (folder,) = tmp_path.iterdir()
    found = read_run(folder)
    assert found.series["grad_norm"].steps == [1, 2]
    assert found.profiles["stream_rms"].steps == [1, 2]


@pytest.mark.parametrize("on", [True, False])
def test_an_error_in_a_monitored_loop_loses_nothing(on: bool, late: Callable[[bool], None], tmp_path: Path) -> None:
    late(on)
    model = made.net()
    monitor = normscale.Monitor(model, runs=tmp_path, every=1)

    def loop() -> None:
        with monitor:
            made.train(model, monitor, made.batches(2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert read_run(monitor.run_dir).profiles["stream_rms"].steps == [1, 2]


def test_a_rank_that_ends_alone_drops_what_had_failed_on_another(late: Callable[[bool], None]) -> None:
    late(True)
    guard = Guard([Failing("attach"), Other()], rank=0, world=2)

    def with_a_failure(values: torch.Tensor) -> torch.Tensor:
        """Returns the sums over two ranks, on the other of which the first probe has failed at its second step."""
        values = values.clone()
        values[-2] += step == 2
        return values

    def never(values: torch.Tensor) -> torch.Tensor:
        return values

    for step in (1, 2):
        sent = guard.send(step, with_a_failure, never)
        assert not sent.ready
        readings = guard.receive(sent, alone=True)
        assert len(readings) == 3 - step
    assert guard.off == {"failing": "it failed on another rank"}
    assert guard.news() == [("failing", "it failed on another rank")]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
