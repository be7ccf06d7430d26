"""Probes against plain autograd, and the promise that they change nothing."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from normscale.config.schema import ModelConfig, RunConfig
from normscale.data.task import MicroBatch
from normscale.models.builder import build
from normscale.probes.activations import Activations
from normscale.probes.gradients import Gradients, depth_slope
from normscale.probes.probe import Array, Hand, Probe, Reading, Subject, collect
from normscale.probes.update import ModelUpdate
from normscale.train.engines.plain import PlainEngine
from normscale.train.loop import Trainer, summed_loss
from normscale.train.observe import subject_of

MODEL = {"M": 3, "d": 16, "heads": 2, "context": 8}


class Notes:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.values: dict[int, Mapping[str, float]] = {}
        self.profiles: dict[tuple[int, str], Array] = {}
        self.events: list[dict[str, object]] = []
        self.rows: list[Mapping[str, object]] = []

    def metrics(self, step: int, applied: int, values: Mapping[str, float]) -> None:
        self.values[step] = values

    def profile(self, step: int, name: str, data: Array) -> None:
        self.profiles[step, name] = np.asarray(data)

    def event(self, step: int, event: str, **fields: object) -> None:
        self.events.append({"step": step, "event": event, **fields})

    def ledger(self, rows: Sequence[Mapping[str, object]]) -> None:
        self.rows += rows


def windows(steps: int, micro: int = 1, size: int = 4) -> list[list[MicroBatch]]:
    generator = torch.Generator().manual_seed(0)
    draws = [[torch.randint(0, 32, (size, 9), generator=generator) for _ in range(micro)] for _ in range(steps)]
    return [[MicroBatch(x[:, :-1], x[:, 1:]) for x in window] for window in draws]


def trained(
    probes: list[Probe], steps: int = 4, micro: int = 1, model: Mapping[str, object] = {}, **train: object
) -> tuple[Trainer, Notes]:
    precision = train.pop("precision", {})
    config = RunConfig(
        model=MODEL | dict(model),
        train={"steps": steps, "batch": 4 * micro, "accumulate": micro, **train},
        precision=precision,
        probes={"every": 1},
    )
    torch.manual_seed(0)
    engine = PlainEngine(build(config.model, 32, 0), config.precision, torch.device("cpu"))
    subject = subject_of(engine)
    for probe in probes:
        probe.attach(subject)
    trainer, notes = Trainer(engine, config, probes), Notes()
    for window in windows(steps, micro):
        trainer.step(window, notes)
    return trainer, notes


@pytest.mark.parametrize(("scheme", "grows"), [("pre", True), ("post", False), ("deepnorm", False)])
def test_what_is_logged_over_a_hundred_blocks_is_the_stream(scheme: str, grows: bool) -> None:
    """PR-003 (OLMo#797): growth under Pre-Norm is reported as it is; what norms put out would be 1 everywhere."""
    model = {"scheme": scheme, "M": 100, "d": 64, "heads": 4}
    _, notes = trained([Activations()], steps=1, model=model)
    stream = notes.profiles[1, "stream_rms"]
    assert stream.shape == (200,)
    if grows:
        assert stream[1] < 0.5 * stream[19] < 0.25 * 2 * stream[199]
    else:
        assert (np.abs(stream - 1) < 0.1).all()


@pytest.mark.parametrize("scheme", ["pre", "deepnorm"])
def test_rows_are_those_of_the_branches_and_the_streams(scheme: str) -> None:
    _, notes = trained([Activations()], steps=1, micro=2, model={"scheme": scheme})
    model = build(ModelConfig(**MODEL, scheme=scheme), 32, 0)
    branches: list[list[Tensor]] = [[] for _ in range(6)]
    streams: list[list[Tensor]] = [[] for _ in range(6)]
    for i, sublayer in enumerate(model.sublayers()):
        sublayer.branch.register_forward_hook(lambda m, a, out, i=i: branches[i].append(out))
        sublayer.register_forward_hook(lambda m, a, out, i=i: streams[i].append(out[0]))
    for batch in windows(1, 2)[0]:
        model(batch.tokens_BT)
    for name, seen in (("branch", branches), ("stream", streams)):
        both = [torch.cat(tensors) for tensors in seen]  # both micro-batches
        np.testing.assert_allclose(
            notes.profiles[1, f"{name}_rms"], [float(x.square().mean().sqrt()) for x in both], rtol=1e-5
        )
        np.testing.assert_allclose(notes.profiles[1, f"{name}_absmax"], [float(x.abs().max()) for x in both], rtol=1e-6)
        assert (notes.profiles[1, f"{name}_nonfinite"] == 0).all()
    assert notes.values[1]["stream_last"] == pytest.approx(notes.profiles[1, "stream_rms"][-1])


def stub(streams: int, squares: Tensor) -> Subject:
    """Four sites of width 4, whose gradients have these sums of squares."""
    return Subject(
        [f"decoder.{c}" for c in "abcd"],
        streams,
        4,
        torch.device("cpu"),
        features=lambda tokens: tokens,
        gradient_squares=lambda: squares,
    )


def reading(probe: Probe) -> Reading:
    return collect([probe], lambda x: x, lambda x: x)[0]


@pytest.mark.parametrize("streams", [1, 2])
def test_each_step_is_folded_over_its_micro_batches_and_over_nothing_else(streams: int) -> None:
    probe = Activations()
    probe.attach(stub(streams, torch.zeros(4)))
    sites, generator = probe.rows.view(4, 1 + streams, 3), torch.Generator().manual_seed(0)
    for step, size in ((1, 100.0), (2, 1.0), (3, 10.0)):  # the second and third are smaller than the first
        probe.begin(step)
        filled = []
        for tokens in (5, 3):
            sites.copy_(size * torch.rand(sites.shape, generator=generator))
            sites[..., 2].random_(0, 9, generator=generator)  # counts of non-finite entries
            filled.append(sites.clone().double())
            probe.after_micro_batch({"decoder": tokens})
        rms = ((filled[0] + filled[1])[..., 0] / (8 * 4)).sqrt().numpy()
        absmax, nonfinite = torch.maximum(*filled)[..., 1].numpy(), (filled[0] + filled[1])[..., 2].numpy()
        got = reading(probe)
        for column, name in enumerate(("branch", "stream")):
            np.testing.assert_allclose(got.profiles[f"{name}_rms"], rms[:, column], rtol=1e-6)
            np.testing.assert_allclose(got.profiles[f"{name}_absmax"], absmax[:, column], rtol=1e-6)
            assert got.profiles[f"{name}_nonfinite"].tolist() == nonfinite[:, column].tolist()
        assert nonfinite.max() > 0


def test_every_scalar_is_its_entry_of_a_profile() -> None:
    activations, gradients = Activations(), Gradients()
    for probe in (activations, gradients):
        probe.attach(stub(1, torch.tensor([16.0, 4.0, 64.0, 25.0])))
    activations.begin(1)
    # [sum of squares, largest], over one target of width 4; neither end is the largest or the smallest.
    branch = [[256.0, 8.0], [16.0, 2.0], [64.0, 30.0], [64.0, 5.0]]  # RMS 8, 2, 4, 4
    stream = [[64.0, 7.0], [400.0, 20.0], [4.0, 3.0], [16.0, 6.0]]  # RMS 4, 10, 1, 2
    activations.rows.view(4, 2, 3)[..., :2] = torch.tensor([branch, stream]).transpose(0, 1)
    activations.after_micro_batch({"decoder": 1})
    gradients.after_backward()
    assert reading(activations).scalars == {
        "stream_first": 4.0,
        "stream_last": 2.0,
        "stream_max": 20.0,
        "branch_p50": 2.0,  # of 2, 1/5, 4 and 2
        "stream_growth": pytest.approx(depth_slope(np.array([4.0, 10.0, 1.0, 2.0]))),
        "headroom": pytest.approx(128 - math.log2(30.0)),
        "headroom_layer": 2.0,
    }
    assert reading(gradients).scalars == {
        "grad_first": 4.0,
        "grad_last": 5.0,
        "grad_p50": 4.5,
        "grad_min": 2.0,
        "grad_max": 8.0,
        "grad_argmin": 1.0,
        "grad_argmax": 2.0,
        "grad_slope_now": pytest.approx(depth_slope(np.array([4.0, 2.0, 8.0, 5.0]))),
    }


def test_gradient_rows_are_those_of_plain_autograd() -> None:
    _, notes = trained([Gradients()], steps=1, micro=2)
    model = build(ModelConfig(**MODEL), 32, 0)
    batch = windows(1, 2)[0]
    loss = sum(summed_loss(model(x.tokens_BT), x.targets_BT) for x in batch) / sum(x.n_targets for x in batch)
    loss.backward()
    wanted = [
        float(torch.cat([p.grad.flatten() for p in sublayer.parameters()]).norm()) for sublayer in model.sublayers()
    ]
    np.testing.assert_allclose(notes.profiles[1, "grad_norm"], wanted, rtol=1e-4)
    everything = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert notes.values[1]["grad_norm"] == pytest.approx(float(everything), rel=1e-5)


def test_the_update_is_measured_from_the_first_weights() -> None:
    tokens = torch.randint(0, 32, (2, 8))
    _, notes = trained([ModelUpdate({"tokens_BT": tokens}, (2, 3))], steps=4)
    replay, _ = trained([], steps=3, model={})
    assert "update" not in notes.values[1]
    assert notes.values[3]["update"] > notes.values[2]["update"] > 0
    with torch.no_grad():
        origin = build(ModelConfig(**MODEL), 32, 0).features(tokens)
        moved = (replay.engine.inner.features(tokens) - origin).norm(dim=-1).mean()
    assert notes.values[3]["update"] == pytest.approx(float(moved), rel=1e-5)


def test_the_update_survives_a_restart() -> None:
    tokens = torch.randint(0, 32, (2, 8))
    whole, _ = trained([probe := ModelUpdate({"tokens_BT": tokens}, (4,))], steps=2)
    again = ModelUpdate({"tokens_BT": tokens}, (4,))
    again.load_state_dict(probe.state_dict())
    again.attach(subject_of(whole.engine))  # the weights have moved; the origin must not
    assert again.origin is not None
    assert probe.origin is not None
    assert torch.equal(again.origin, probe.origin)


@pytest.mark.parametrize(
    "setting",
    [
        {"model": {"dropout": 0.2}},
        {"model": {"dropout": 0.2, "checkpointing": True}},
        {"precision": {"compute": "bf16"}},
        {"micro": 2, "optim": {"name": "sgd", "lr": 0.1, "clip": 0.5}},
    ],
    ids=["dropout", "recompute", "bf16", "accumulate"],
)
def test_probes_change_no_bit(setting: dict[str, object]) -> None:
    tokens = torch.randint(0, 32, (2, 8))
    plain, _ = trained([], **setting)  # type: ignore[arg-type]
    probed, _ = trained([Activations(), Gradients(), ModelUpdate({"tokens_BT": tokens}, (1, 2))], **setting)  # type: ignore[arg-type]
    assert torch.equal(plain.engine.flat.values, probed.engine.flat.values)
    assert list(plain.spikes.past) == list(probed.spikes.past)


class DictOutput(nn.Module):
    """A block that returns a dictionary and is followed by operations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"h": self.inner(x)}


def test_gradients_of_modules_with_odd_outputs_are_seen() -> None:
    from normscale.train.flat import FlatParameters

    torch.manual_seed(0)
    model = nn.ModuleList([DictOutput(), DictOutput()])
    flat = FlatParameters(model)
    x = torch.randn(3, 4)
    for block in model:
        x = block(x)["h"]
        x += 1
        x = torch.relu_(x)
    x.square().sum().backward()
    groups = [["0.inner.weight", "0.inner.bias"], ["1.inner.weight", "1.inner.bias"]]
    wanted = [sum(float(p.grad.square().sum()) for p in block.parameters()) for block in model]
    np.testing.assert_allclose(flat.squares(groups).numpy(), wanted, rtol=1e-5)
    assert min(wanted) > 0


class Given(Probe):
    name = "given"

    def __init__(self, **hands: Hand) -> None:
        self.hands = hands

    def hand_over(self) -> Mapping[str, Hand]:
        return self.hands

    def read(self, values: Mapping[str, Array]) -> Reading:
        return Reading(profiles=dict(values))


def test_two_collectives_whatever_the_depth_and_each_number_comes_home() -> None:
    calls: list[tuple[str, Tensor]] = []

    def reduce(kind: str, factor: float):  # type: ignore[no-untyped-def]
        return lambda x: calls.append((kind, x)) or x * factor

    one = Given(a=Hand(torch.tensor([1.0, 2.0]), "sum"), b=Hand(torch.tensor([5.0, math.nan]), "max"))
    two = Given(c=Hand(torch.tensor(3.0), "first"), d=Hand(torch.tensor([4.0]), "sum"))
    first, second = collect([one, two], reduce("sum", 2), reduce("max", 1))
    assert [kind for kind, _ in calls] == ["sum", "max"]
    assert first.profiles["a"].tolist() == [2.0, 4.0]
    assert first.profiles["b"].tolist() == [5.0, math.inf]  # a NaN must not be lost in a maximum over ranks
    assert (second.profiles["c"].tolist(), second.profiles["d"].tolist()) == ([3.0], [8.0])


def test_the_largest_of_infinite_values_is_the_one_that_was_handed_over() -> None:
    given = Given(a=Hand(torch.tensor([-math.inf, math.inf, -1.0]), "max"))
    (reading,) = collect([given], lambda x: x, lambda x: x)
    assert reading.profiles["a"].tolist() == [-math.inf, math.inf, -1.0]


def test_slope_of_a_power_law_and_of_vanished_gradients() -> None:
    n = np.arange(1, 101.0)
    assert depth_slope(3 * n**-0.5) == pytest.approx(-0.5)
    assert depth_slope(np.where(n < 50, 0.0, n**2)) == pytest.approx(2.0)
    assert math.isnan(depth_slope(np.zeros(4)))
    assert math.isnan(depth_slope(np.ones(1)))
