"""Steps that go wrong: what counts as wrong, which layer is named, and what the policy makes of it."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.cli import main
from normscale.config.schema import RunConfig
from normscale.probes.activations import Activations
from normscale.probes.culprit import Culprit
from normscale.probes.gradients import Gradients
from normscale.tracking.reader import read_run
from normscale.train import loop, provenance
from normscale.train.loop import Trainer, summed_loss
from normscale.train.provenance import Found, Provenance
from normscale.train.run import run
from tests.probes.test_probes import Notes, windows
from tests.train.test_loop import poisoned, trainer
from tests.train.test_run import config


def test_a_loss_that_is_not_finite_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    t, notes = trainer(), Notes()
    before = t.engine.flat.values.clone()
    monkeypatch.setattr(loop, "summed_loss", lambda logits, targets: summed_loss(logits, targets) + math.nan)
    result = t.step(windows(1)[0], notes)
    assert math.isfinite(result.norm)  # the gradient of a constant is nothing
    assert not result.applied
    assert torch.equal(t.engine.flat.values, before)
    event = notes.events[0]
    assert (event["fault"], event["layer"], event["parameter"], event["parameters_bad"]) == ("loss", -1, "", 0)


def test_what_lies_in_no_block_has_the_run_up_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that was interrupted, too."""
    (one, other), notes = (trainer(probes=[Activations()]) for _ in range(2)), Notes()
    given = windows(4)
    one.step(given[0], notes)
    one.step(given[1], notes)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    other.step(given[2], notes)
    monkeypatch.setattr(loop, "summed_loss", lambda logits, targets: summed_loss(logits, targets) + math.nan)
    other.step(given[3], notes)
    (event,) = [event for event in notes.events if event["event"] == "nonfinite"]
    assert (event["layer"], event["run_up_of"].partition(",")[0]) == (-1, "the whole model")  # type: ignore[attr-defined]
    assert [row["step"] for row in event["run_up"]] == [1, 2, 3]  # type: ignore[attr-defined]
    for row in event["run_up"]:  # type: ignore[attr-defined]
        assert row == row | {"loss_train": notes.values[row["step"]]["loss_train"]}
        assert {"grad_norm", "stream_first", "stream_last"} <= set(row)


def test_the_first_bad_step_is_kept_and_each_is_told() -> None:
    t, notes = trainer(), Notes()
    poisoned(t, lambda step: math.nan if step in (2, 4) else 1.0)
    for window in windows(5):
        t.step(window, notes)
    assert t.first_bad is not None
    assert t.first_bad[0] == 2
    assert [event["step"] for event in notes.events] == [2, 4]


def test_every_faulty_parameter_is_listed_up_to_twenty() -> None:
    t, notes = trainer(), Notes()
    poisoned(t, lambda step: math.nan)
    t.step(windows(1)[0], notes)
    names = [name for name, _ in t.engine.inner.named_parameters()]
    assert notes.events[0]["parameters_bad"] == len(names) > 20
    assert [entry["name"] for entry in notes.events[0]["parameters"]] == names[:20]  # type: ignore[attr-defined]


def test_several_faults_are_told_apart_and_the_last_in_model_order_is_where_backward_went_wrong() -> None:
    t, notes = trainer(), Notes()
    inner = t.engine.inner
    inner.token.register_hook(lambda g: g.index_fill(0, torch.tensor([3]), math.nan))  # an end: no layer
    for block, bad in ((0, -math.inf), (1, math.inf)):
        bias = inner.blocks[block].sublayers["ffn"].branch.up.bias  # type: ignore[index,union-attr]
        bias.register_hook(lambda g, bad=bad: g.index_fill(0, torch.tensor([0, 1]), bad))
    t.step(windows(1)[0], notes)
    event = notes.events[0]
    shared = {"nan": 0, "pos_inf": 0, "neg_inf": 0}
    assert event["parameters"] == [
        shared | {"name": "token", "kind": "NaN", "nan": 16},
        shared | {"name": "blocks.0.sublayers.ffn.branch.up.bias", "kind": "-Inf", "neg_inf": 2},
        shared | {"name": "blocks.1.sublayers.ffn.branch.up.bias", "kind": "+Inf", "pos_inf": 2},
    ]
    assert (event["parameters_bad"], event["layer"]) == (3, 3)
    assert event["parameter"] == "blocks.1.sublayers.ffn.branch.up.bias"
    assert t.first_bad == (1, 3, "blocks.1.sublayers.ffn.branch.up.bias")


def spoil(x: Tensor) -> Tensor:
    """`x` with +Inf in one place."""
    return torch.where(torch.arange(x.numel()).view_as(x) == 5, torch.inf, x)


@contextmanager
def forward_fault(t: Trainer, site: int, step: int) -> Iterator[None]:
    """Puts +Inf into the branch output of one site in one step."""

    def hook(module: object, args: object, out: Tensor) -> Tensor | None:
        return spoil(out) if t.attempted == step else None

    handle = t.engine.inner.sublayers()[site].branch.register_forward_hook(hook)
    yield
    handle.remove()


@contextmanager
def backward_fault(t: Trainer, site: int, step: int) -> Iterator[None]:
    """Puts +Inf into the gradient of the stream after one site in one step."""

    def hook(module: object, args: object, streams: tuple[Tensor, ...]) -> None:
        if t.attempted == step and streams[0].requires_grad:
            streams[0].register_hook(spoil)

    handle = t.engine.inner.sublayers()[site].register_forward_hook(hook)
    yield
    handle.remove()


@pytest.mark.parametrize("scheme", ["pre", "deepnorm"])
@pytest.mark.parametrize("site", [0, 3, 4])
@pytest.mark.parametrize("fault", [forward_fault, backward_fault])
def test_a_fault_inside_the_graph_is_put_down_to_its_layer(fault: Callable, site: int, scheme: str) -> None:  # type: ignore[type-arg]
    t, notes = trainer(model={"scheme": scheme}), Notes()
    with fault(t, site, step=2):
        results = [t.step(window, notes) for window in windows(3)]
    assert [result.applied for result in results] == [True, False, True]
    assert math.isfinite(results[1].loss) is (fault is backward_fault)
    assert [(event["step"], event["layer"]) for event in notes.events] == [(2, site)]
    assert t.first_bad is not None
    assert t.first_bad[:2] == (2, site)
    if fault is backward_fault:
        assert t.engine.inner.site_of(t.first_bad[2]) == site


def test_the_right_micro_batch_is_looked_at() -> None:
    t, notes = trainer(accumulate=2, batch=8), Notes()
    before, window = windows(2, micro=2)
    marked = window[1][0]

    def hook(module: object, args: tuple[Tensor, ...]) -> None:
        t.second = torch.equal(args[0], marked)  # type: ignore[attr-defined]

    t.engine.inner.register_forward_pre_hook(hook)
    branch = t.engine.inner.sublayers()[4].branch
    branch.register_forward_hook(lambda m, a, out: spoil(out) if t.second else None)  # type: ignore[attr-defined]
    t.step(before, notes)
    t.step(window, notes)
    assert only(notes)["layer"] == 4
    assert only(notes)["culprit"]["micro_batch"] == 1


@pytest.mark.parametrize(("policy", "outcome", "code", "steps"), [("stop", "nan", 3, 3), ("skip", "finished", 0, 6)])
def test_a_gradient_alone_stops_a_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, outcome: str, code: int, steps: int
) -> None:
    original = Trainer.step

    def step(self, window, recorder):  # type: ignore[no-untyped-def]
        with backward_fault(self, site=2, step=3):
            result = original(self, window, recorder)
        assert math.isfinite(result.loss)
        return result

    monkeypatch.setattr(Trainer, "step", step)
    train = {"steps": 6, "batch": 4, "eval_batches": 2, "on_nonfinite": policy}
    result = run(config(tmp_path, train=train, probes={"every": 2}))
    summary = result.summary
    assert (result.outcome, result.exit_code, summary["steps"]) == (outcome, code, steps)
    assert (summary["bad_step"], summary["bad_layer"], summary["skipped"]) == (3, 2, 1)
    assert summary["bad_parameter"].startswith("blocks.1.sublayers.self.")
    assert summary["applied"] == steps - 1


def only(notes: Notes) -> dict[str, Any]:
    """The one event of a step that was not finite."""
    (event,) = [event for event in notes.events if event["event"] == "nonfinite"]
    return event


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_event_names_the_module_and_how_its_site_came_to_it(checkpointing: bool) -> None:
    probes = [Activations(), Gradients()]
    t, notes = trainer(model={"checkpointing": checkpointing, "dropout": 0.2}, probes=probes), Notes()
    with forward_fault(t, site=3, step=8):
        for window in windows(8):
            t.step(window, notes)
    event = only(notes)
    culprit = Culprit.from_fields(event["culprit"])
    assert (culprit.phase, culprit.module, culprit.type) == ("forward", "blocks.1.sublayers.ffn.branch", "FeedForward")
    assert (culprit.tensor, culprit.kind, culprit.pos_inf, culprit.micro_batch) == ("output", "+Inf", 1, 0)
    assert culprit.reproduced
    assert [row["step"] for row in event["run_up"]] == [3, 4, 5, 6, 7]
    for row in event["run_up"]:
        for name in ("stream_rms", "branch_absmax", "grad_norm"):
            assert row[name] == notes.profiles[row["step"], name][3]
    assert (event["policy"], event["in_a_row"]) == ("stop", 1)


def test_a_step_after_a_replay_is_the_step_it_would_have_been() -> None:
    replayed, plain = (trainer(model={"dropout": 0.3}, probes=[Activations()]) for _ in range(2))
    plain.provenance.seek = lambda loss, factor: Found(-1, None, (), None, [])  # type: ignore[method-assign]
    ends = []
    for t in (replayed, plain):
        torch.manual_seed(5)
        with forward_fault(t, site=2, step=2):
            for window in windows(4):
                t.step(window, Notes())
        ends.append((t.engine.flat.values.clone(), torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_fault_that_one_dropout_mask_brings_about_is_found() -> None:
    t, notes = trainer(model={"dropout": 0.5}), Notes()
    branch = t.engine.inner.sublayers()[2].branch

    def hook(module: object, args: object, out: Tensor) -> Tensor:
        return out / (torch.rand(()) > 0.5)

    handle = branch.register_forward_hook(hook)
    torch.manual_seed(0)
    applied = [t.step(window, notes).applied for window in windows(8)]
    handle.remove()
    assert 0 < sum(applied) < 8
    assert {event["culprit"]["module"] for event in notes.events} == {"blocks.1.sublayers.self.branch"}  # type: ignore[index]


def test_clipping_never_sees_an_infinite_norm() -> None:
    """pytorch#46849: one Inf entry would make all other gradients 0 and itself NaN."""
    t, notes = trainer(optim={"name": "adamw", "lr": 0.1, "clip": 1.0}), Notes()
    for window in windows(2):
        t.step(window, notes)
    weights, state = t.engine.flat.values.clone(), copy.deepcopy(t.optimizer.state_dict()["state"])
    bias = t.engine.inner.blocks[1].sublayers["ffn"].branch.up.bias  # type: ignore[index,union-attr]
    handle = bias.register_hook(lambda g: g.index_fill(0, torch.tensor([1]), math.inf))
    result = t.step(windows(1)[0], notes)
    handle.remove()
    event = only(notes)
    assert [(entry["name"], entry["kind"]) for entry in event["parameters"]] == [
        ("blocks.1.sublayers.ffn.branch.up.bias", "+Inf")
    ]
    assert (event["culprit"]["tensor"], event["culprit"]["module"]) == (
        "gradient of bias",
        "blocks.1.sublayers.ffn.branch.up",
    )
    assert (event["culprit"]["pos_inf"], event["culprit"]["nan"]) == (1, 0)
    assert not result.applied
    assert torch.equal(t.engine.flat.values, weights)
    assert int(torch.isfinite(t.engine.flat.grads).sum()) == t.engine.flat.grads.numel() - 1  # nothing was clipped
    for index, before in state.items():
        for name, value in t.optimizer.state_dict()["state"][index].items():
            assert torch.equal(value, before[name])


def test_a_norm_of_finite_gradients_that_overflows_is_told_apart() -> None:
    t, notes = trainer(), Notes()
    token = t.engine.inner.token
    token.register_hook(lambda g: torch.full_like(g, 1e20))
    t.step(windows(1)[0], notes)
    event = only(notes)
    assert event["fault"].startswith("norm overflow")
    assert (event["culprit"]["phase"], event["culprit"]["kind"]) == ("norm", "+Inf")
    assert event["parameters_bad"] == 0


def test_a_sum_over_micro_batches_that_overflows_is_no_modules_fault() -> None:
    t, notes = trainer(accumulate=2, batch=8), Notes()
    bias = t.engine.inner.blocks[1].sublayers["ffn"].branch.up.bias  # type: ignore[index,union-attr]
    bias.register_hook(lambda g: torch.full_like(g, 3e38))
    t.step(windows(1, micro=2)[0], notes)
    event = only(notes)
    culprit = event["culprit"]
    assert (culprit["phase"], culprit["module"], culprit["tensor"]) == (
        "reduction",
        "blocks.1.sublayers.ffn.branch.up",
        "gradient of bias",
    )
    assert (culprit["reproduced"], culprit["micro_batch"], event["layer"]) == (False, -1, 3)


def test_a_fault_outside_the_model_is_not_pinned_on_it() -> None:
    t, notes = trainer(), Notes()
    poisoned(t, lambda step: math.nan)
    t.step(windows(1)[0], notes)
    assert "culprit" not in only(notes)


def test_a_replay_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object, **more: object) -> None:
        raise RuntimeError("no memory")

    t, notes = trainer(), Notes()
    monkeypatch.setattr(provenance, "replay", failing)
    with forward_fault(t, site=3, step=1):
        t.step(windows(1)[0], notes)
    event = only(notes)
    assert event["replay_refused"] == "RuntimeError: no memory"
    assert (event["layer"], event["culprit"]["reproduced"]) == (3, False)
    assert event["culprit"]["module"] == "blocks.1.sublayers.ffn.branch"


def test_rows_that_fail_end_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The other ranks wait to agree on what was found."""

    def failing(*args: object, **more: object) -> None:
        raise RuntimeError("no memory")

    t, notes = trainer(), Notes()
    monkeypatch.setattr(provenance, "replay", failing)
    monkeypatch.setattr(Provenance, "_by_rows", failing)
    with forward_fault(t, site=3, step=1):
        t.step(windows(1)[0], notes)
    assert "culprit" not in only(notes)
    assert t.provenance.site_by_rows() == -1
    assert "RuntimeError: no memory" in capsys.readouterr().err
    monkeypatch.setattr(Provenance, "_by_gradients", failing)
    with backward_fault(t, site=3, step=2):
        result = t.step(windows(1)[0], notes)
    assert math.isfinite(result.loss)
    assert not result.applied


def test_a_step_that_is_not_applied_leaves_the_buffers_as_they_were() -> None:
    """No model here writes any; one that did is asked for nothing else."""
    engine = trainer().engine
    module = engine.inner.sublayers()[0].branch
    module.register_buffer("average", torch.zeros(()))

    def hook(module: Any, args: Any, out: Tensor) -> None:
        module.average.add_(out.detach().mean())

    module.register_forward_hook(hook)
    t, notes = Trainer(engine, trainer().config, []), Notes()
    window = windows(1)[0]
    t.step(window, notes)
    before = module.average.clone()
    assert before != 0
    with forward_fault(t, site=0, step=2):
        assert not t.step(window, notes).applied
    assert torch.equal(module.average, before)
    assert only(notes)["culprit"]["module"] == "blocks.0.sublayers.self.branch"
    t.step(window, notes)
    assert not torch.equal(module.average, before)


def faulty(monkeypatch: pytest.MonkeyPatch, bad: Callable[[int], bool]) -> None:
    """Makes site 2 give +Inf in the steps that are `bad`."""
    original = Trainer.step

    def step(self, window, recorder):  # type: ignore[no-untyped-def]
        with forward_fault(self, site=2, step=self.attempted + 1 if bad(self.attempted + 1) else -1):
            return original(self, window, recorder)

    monkeypatch.setattr(Trainer, "step", step)


def test_a_run_stops_after_so_many_bad_steps_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, lambda step: step == 2 or step >= 5)
    train = {"steps": 12, "batch": 4, "eval_batches": 2, "on_nonfinite": "skip", "stop_after": 3}
    result = run(config(tmp_path, train=train, probes={"every": 2}))
    assert (result.outcome, result.exit_code, result.summary["steps"]) == ("nan", 3, 7)
    assert (result.summary["bad_step"], result.summary["stopped_after"]) == (2, 3)
    assert "blocks.1.sublayers.self.branch" in result.summary["culprit"]
    events = [event for event in read_run(result.run_dir).events if event["event"] == "nonfinite"]
    assert [(event["step"], event["in_a_row"], event["policy"]) for event in events] == [
        (2, 1, "stop after 3"),
        (5, 1, "stop after 3"),
        (6, 2, "stop after 3"),
        (7, 3, "stop after 3"),
    ]


def test_the_row_goes_on_where_a_run_was_interrupted() -> None:
    one, other = (trainer(on_nonfinite="skip", stop_after=2, probes=[Activations()]) for _ in range(2))
    notes = Notes()
    given = windows(4)
    for window in given[:2]:
        one.step(window, Notes())
    with forward_fault(one, site=2, step=3):
        assert not one.stops(one.step(given[2], notes))
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert other.culprit() == one.culprit() is not None
    with forward_fault(other, site=2, step=4):
        assert other.stops(other.step(given[3], notes))
    bad = [event for event in notes.events if event["event"] == "nonfinite"]
    assert [row["step"] for row in bad[1]["run_up"]] == [1, 2, 3]  # type: ignore[attr-defined]


def test_stopping_after_so_many_needs_a_policy_that_goes_on() -> None:
    with pytest.raises(ValueError, match="stop_after"):
        RunConfig(train={"on_nonfinite": "stop", "stop_after": 3})


def test_a_loss_scale_at_its_floor_ends_the_run_with_the_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed#697: scale 16, floor 1, so steps 1 to 4 halve it; then three in a row are the model's."""
    faulty(monkeypatch, lambda step: True)
    words = ["model.M=2", "model.d=16", "model.heads=2", "model.context=16", "data.max_bytes=40000", "train.steps=20"]
    words += ["train.batch=4", "train.eval_batches=1", "train.on_nonfinite=skip", "train.stop_after=3"]
    words += ["precision.compute=fp16", "precision.loss_scale.initial=16", "tracking.uri=null"]
    quick = Path(__file__).parents[2] / "configs/train/quick.yaml"
    assert main(["train", str(quick), *words, f"tracking.runs={tmp_path}"]) == 3
    said = [line for line in capsys.readouterr().err.splitlines() if "stopped at step" in line]
    assert len(said) == 1
    assert said[0].startswith("normscale: stopped at step 7: the loss or the gradient was not finite 3 times in a row")
    assert "blocks.1.sublayers.self.branch" in said[0]
    (folder,) = tmp_path.glob("*-*")
    record = read_run(folder)
    told = [(event["step"], event["event"]) for event in record.events if event["event"] in ("loss_scale", "nonfinite")]
    assert told == [(n, "loss_scale") for n in range(1, 5)] + [(n, "nonfinite") for n in range(5, 8)]
    # So many in a row that a run without a scale would have ended: the culprit is sought though nothing ends.
    scales = [event for event in record.events if event["event"] == "loss_scale"]
    assert ["culprit" in event for event in scales] == [False, False, True, False]
    assert (record.end or {})["outcome"] == "nan"
