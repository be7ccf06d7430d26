"""What is measured over depth, against plain autograd and plain loops over the same batches."""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from normscale.config.precision import LossScaleConfig
from normscale.config.schema import ModelConfig, RunConfig
from normscale.data.task import IGNORE, MicroBatch
from normscale.models.builder import build
from normscale.models.stack import Transformer
from normscale.probes.activations import Activations
from normscale.probes.angles import Angles
from normscale.probes.attention import Attention
from normscale.probes.gradients import Gradients
from normscale.probes.output import OutputSoftmax
from normscale.probes.probe import Parameters, Probe, Subject, collect
from normscale.probes.stream_gradients import StreamGradients
from normscale.probes.weights import ENTRIES, WeightUpdates
from normscale.tracking.record import PROFILES, QUANTITIES
from normscale.train.engines.plain import PlainEngine
from normscale.train.loop import Trainer, summed_loss
from normscale.train.observe import subject_of
from normscale.train.scaler import LossScale
from tests.probes.test_probes import MODEL, Notes, trained, windows

SCHEMES = ["pre", "deepnorm"]


def every_probe() -> list[Probe]:
    return [
        Activations(),
        StreamGradients(),
        Gradients(),
        WeightUpdates(),
        Angles(),
        OutputSoftmax(),
        Attention(),
    ]


def twin(scheme: str, **options: Any) -> Transformer:
    return build(ModelConfig(**MODEL | options, scheme=scheme), 32, 0)


def uneven(micro: int = 2) -> list[MicroBatch]:
    """A window of 16 positions a micro-batch, all of which are sampled; not all are targets."""
    (batches,) = windows(1, micro, size=2)
    targets = [batch.targets_BT.clone() for batch in batches]
    for i, target in enumerate(targets):
        target[:, : 3 * i + 1] = IGNORE
    return [batch._replace(targets_BT=target) for batch, target in zip(batches, targets, strict=True)]


def trainer_of(probes: list[Probe], model: Mapping[str, Any], micro: int = 1, **more: Any) -> Trainer:
    train = {"steps": 9, "batch": 2 * micro, "accumulate": micro}
    config = RunConfig(model=MODEL | dict(model), train=train, probes={"every": 1}, **more)
    engine = PlainEngine(build(config.model, 32, 0), config.precision, torch.device("cpu"))
    for probe in probes:
        probe.attach(subject_of(engine))
    return Trainer(engine, config, probes)


def measured(
    probes: list[Probe], window: list[MicroBatch], model: Mapping[str, Any], change: Callable[[Any], None] | None = None
) -> Notes:
    """What the probes say of one step on a window."""
    trainer, notes = trainer_of(probes, model, len(window)), Notes()
    if change is not None:
        change(trainer)
    trainer.step(window, notes)
    return notes


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def streams_of(model: Transformer, batch: MicroBatch) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The stream after each site, each branch, and the logits."""
    streams: list[Tensor] = []
    branches: list[Tensor] = []
    hooks = []
    for sublayer in model.sublayers():
        hooks.append(sublayer.branch.register_forward_hook(lambda m, a, out: branches.append(out)))
        hooks.append(sublayer.register_forward_hook(lambda m, a, out: streams.append(out[0])))
    logits = model(batch.tokens_BT, **batch.beside)
    for hook in hooks:
        hook.remove()
    return streams, branches, logits


def test_means_ratios_and_growth_of_the_stream(scheme: str) -> None:
    window, model = uneven(), twin(scheme)

    def shifted(of: Transformer) -> None:
        """Gives the streams a mean, which a norm without a bias has not."""
        with torch.no_grad():
            for sublayer in of.sublayers():
                sublayer.own.module("norm").bias.add_(0.3)

    shifted(model)
    notes = measured([Activations()], window, {"scheme": scheme}, lambda trainer: shifted(trainer.engine.inner))
    parts = [streams_of(model, batch)[:2] for batch in window]
    streams, branches = (
        [torch.stack(x).detach().double() for x in zip(*(part[i] for part in parts), strict=True)] for i in range(2)
    )
    rms = [float(x.square().mean().sqrt()) for x in streams]
    share = [abs(float(x.mean())) / r for x, r in zip(streams, rms, strict=True)]
    ratio = [float(b.square().mean().sqrt()) / r for b, r in zip(branches, rms, strict=True)]
    np.testing.assert_allclose(notes.profiles[1, "stream_mean_share"], share, rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(notes.profiles[1, "branch_ratio"], ratio, rtol=1e-5)
    slope = np.polyfit(np.log(np.arange(1, 7)), np.log(rms), 1)[0]
    assert notes.values[1]["stream_growth"] == pytest.approx(slope, rel=1e-4, abs=1e-6)
    assert max(share) > 1e-3
    assert scheme != "pre" or slope > 0.05


def test_the_sum_that_post_norm_normalises_has_rows_of_its_own() -> None:
    window, model = uneven(), twin("deepnorm")
    notes = measured([Activations()], window, {"scheme": "deepnorm"})
    sums: list[list[Tensor]] = [[] for _ in range(6)]
    for batch in window:
        for i, sublayer in enumerate(model.sublayers()):
            sublayer.own.module("norm").register_forward_hook(lambda m, args, out, i=i: sums[i].append(args[0]))
        model(batch.tokens_BT)
        for sublayer in model.sublayers():
            sublayer.own.module("norm")._forward_hooks.clear()
    joined = [torch.stack(site).detach() for site in sums]
    np.testing.assert_allclose(notes.profiles[1, "z_rms"], [float(z.square().mean().sqrt()) for z in joined], rtol=1e-5)
    np.testing.assert_allclose(notes.profiles[1, "z_absmax"], [float(z.abs().max()) for z in joined], rtol=1e-6)
    assert not notes.profiles[1, "z_nonfinite"].any()


def test_a_scheme_without_such_a_sum_has_none() -> None:
    notes = measured([Activations(), StreamGradients()], uneven(), {"scheme": "pre"})
    assert {name for _, name in notes.profiles if name.startswith("z_")} == set()


@pytest.mark.parametrize("how", ["plain", "scaled", "ranks", "recomputed"])
def test_stream_gradients_are_those_of_the_mean_loss(scheme: str, how: str) -> None:
    window, model = uneven(), twin(scheme)
    loss = torch.zeros(())
    streams: list[Tensor] = []
    for batch in window:
        seen, _, logits = streams_of(model, batch)
        streams += seen
        loss = loss + summed_loss(logits, batch.targets_BT)
    grads = torch.autograd.grad(loss / sum(batch.n_targets for batch in window), streams)
    both = [torch.stack([grads[i], grads[6 + i]]) for i in range(6)]

    def change(trainer: Any) -> None:
        if how == "scaled":
            trainer.scale = LossScale(LossScaleConfig(initial=1024.0))
        if how == "ranks":  # the engine's average over ranks is not there: gradients are twice what they should be
            trainer.engine.world, trainer.engine.sum, trainer.engine.max = 2, lambda x: x, lambda x: x

    options = {"scheme": scheme, "checkpointing": how == "recomputed"}
    notes = measured([StreamGradients()], window, options, change)
    want = [float(g.double().norm()) for g in both]
    np.testing.assert_allclose(notes.profiles[1, "stream_grad_norm"], want, rtol=1e-4)
    want = [float(g.abs().max()) for g in both]
    np.testing.assert_allclose(notes.profiles[1, "stream_grad_absmax"], want, rtol=1e-4)
    assert not notes.profiles[1, "stream_grad_nonfinite"].any()


@pytest.mark.parametrize(
    ("scheme", "options", "streams"),
    [
        ("residual", {"s": 0.01}, 2),  # the second stream is the smaller one
        ("residual", {"a": 30.0}, 2),  # and here its gradient is
        ("siamese", {}, 2),
        ("hyper", {}, 4),
        ("pre", {}, 1),
    ],
)
def test_of_a_schemes_other_streams_the_largest_is_reported(scheme: str, options: dict[str, Any], streams: int) -> None:
    window, model = uneven(1), twin(scheme, scheme_options=options)
    seen: list[tuple[Tensor, ...]] = []
    for sublayer in model.sublayers():
        sublayer.register_forward_hook(lambda m, a, out: seen.append(out))
    loss = summed_loss(model(window[0].tokens_BT), window[0].targets_BT) / window[0].n_targets
    notes = measured([Activations(), StreamGradients()], window, {"scheme": scheme, "scheme_options": options})
    assert {len(out) for out in seen} == {streams}
    if streams == 1:
        assert not [name for _, name in notes.profiles if name.startswith("other_")]
        return
    grads = torch.autograd.grad(loss, [x for out in seen for x in out], materialize_grads=True)
    rms = np.array([[float(x.detach().square().mean().sqrt()) for x in out] for out in seen])
    norms = np.array([float(g.norm()) for g in grads]).reshape(-1, streams)
    if "s" in options:
        assert (rms[:, 1] < rms[:, 0]).all()
    if "a" in options:
        assert (norms[:, 1] < norms[:, 0]).any()
    for found, want in (("stream_rms", rms[:, 0]), ("other_stream_rms", rms[:, 1:].max(1))):
        np.testing.assert_allclose(notes.profiles[1, found], want, rtol=1e-5)
    for found, want in (("stream_grad_norm", norms[:, 0]), ("other_stream_grad_norm", norms[:, 1:].max(1))):
        np.testing.assert_allclose(notes.profiles[1, found], want, rtol=1e-4)
    assert {name for _, name in notes.profiles} <= PROFILES.keys()


def test_a_gradient_that_does_not_come_again_is_counted_once() -> None:
    probe = StreamGradients()
    probe.attach(Subject(["decoder.0000.self"], 1, 4, torch.device("cpu"), lambda x: x["x"], lambda: torch.ones(1)))
    for _ in range(2):
        probe.begin(1)
        probe.scaled_by(2.0)
        probe.rows[1] = torch.tensor([36.0, 5.0, 1.0])
        probe.after_micro_batch({})
        probe.after_micro_batch({})
        found = collect([probe], lambda x: x, lambda x: x)[0].profiles
        assert {name: float(profile[0]) for name, profile in found.items()} == {
            "stream_grad_norm": 3.0,
            "stream_grad_absmax": 2.5,
            "stream_grad_nonfinite": 1.0,
        }


def test_non_finite_gradients_are_counted_where_they_begin() -> None:
    def change(trainer: Any) -> None:
        third = trainer.engine.inner.sublayers()[3]
        poison = torch.zeros(2, 8, 16)
        poison[0, 1, 2:5] = torch.nan
        third.register_forward_hook(lambda m, a, out: (out[0] + _poisoned(out[0], poison),))

    notes = measured([StreamGradients()], uneven(1), {"scheme": "pre"}, change)
    counts = notes.profiles[1, "stream_grad_nonfinite"]
    assert counts[4:].tolist() == [0.0, 0.0]
    assert counts[3] == 3
    assert (counts[:3] >= 3).all()


def _poisoned(x: Tensor, poison: Tensor) -> Tensor:
    zero = 0.0 * x
    zero.register_hook(lambda g: poison)
    return zero * 1.0


def test_updates_are_the_difference_of_the_weights_over_the_weights(scheme: str) -> None:
    setting: dict[str, Any] = {"model": {"scheme": scheme}, "optim": {"weight_decay": 0.1}}
    _, notes = trained([WeightUpdates()], steps=3, **setting)
    before, after = (trained([], steps=n, **setting)[0] for n in (2, 3))
    rows = []
    for old, new in zip(before.engine.inner.sublayers(), after.engine.inner.sublayers(), strict=True):
        a, b = (torch.cat([p.detach().double().flatten() for p in s.parameters()]) for s in (old, new))
        rows.append(float((b - a).norm() / a.norm()))
    np.testing.assert_allclose(notes.profiles[3, "update_rel"], rows, rtol=1e-4)
    assert notes.values[3]["update_rel_p50"] == pytest.approx(float(np.median(rows)), rel=1e-4)
    assert notes.values[3]["update_rel_max"] == pytest.approx(max(rows), rel=1e-4)
    assert min(rows) > 0


def test_a_step_that_is_not_applied_moves_nothing() -> None:
    def change(trainer: Any) -> None:
        trainer.engine.inner.token.register_hook(lambda g: torch.full_like(g, torch.nan))

    notes = measured([WeightUpdates()], uneven(), {"scheme": "pre"}, change)
    assert notes.values[1]["nonfinite"] == 1.0
    assert not notes.profiles[1, "update_rel"].any()
    assert notes.values[1]["update_rel_max"] == 0.0


def test_attention_is_that_of_every_query_where_all_are_sampled(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    window, model = uneven(), twin(scheme)
    notes = measured([Attention()], window, {"scheme": scheme})
    seen: list[tuple[Tensor, Tensor]] = []

    class Products:
        softmax = "fp32"

        def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return torch.nn.functional.linear(x, weight, bias)

        def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: None, *, causal: bool, dropout: float) -> Tensor:
            seen.append((q, k))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    for module in model.modules():
        if hasattr(module, "products"):
            module.products = Products()
    for batch in window:
        model(batch.tokens_BT)
    largest, entropy = np.full(6, np.nan), np.full(6, np.nan)
    for block in range(3):
        scores = [q.double() @ k.double().mT / q.shape[-1] ** 0.5 for q, k in seen[block::3]]
        scores = [s.masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf) for s in scores]
        largest[2 * block] = max(float(s.detach().max()) for s in scores)
        entropy[2 * block] = np.mean([float(torch.special.entr(s.detach().softmax(-1)).sum(-1).mean()) for s in scores])
    np.testing.assert_allclose(notes.profiles[1, "attn_logit_max"], largest, rtol=1e-5)
    np.testing.assert_allclose(notes.profiles[1, "attn_entropy"], entropy, rtol=1e-5)
    assert notes.values[1]["attn_logit_max"] == pytest.approx(np.nanmax(largest), rel=1e-5)
    assert notes.values[1]["attn_entropy_min"] == pytest.approx(np.nanmin(entropy), rel=1e-5)
    assert 0 < np.nanmin(entropy) < np.nanmax(entropy) < math.log(8)


def test_padding_is_not_looked_at_by_cross_attention() -> None:
    model = {"N": 1, "M": 1, "scheme": "pre"}
    tokens, source = torch.randint(0, 32, (2, 8)), torch.randint(0, 32, (2, 7))
    keep = torch.tensor([[True] * 7, [True] + [False] * 6])
    batch = MicroBatch(tokens, tokens, source, keep)
    notes = measured([Attention()], [batch], model)
    entropy = notes.profiles[1, "attn_entropy"]
    assert np.isnan(entropy).tolist() == [False, True, False, False, True]
    assert entropy[0] < math.log(7) / 2  # half of the sequences have one key to look at
    assert entropy[3] < math.log(7) / 2


def test_log_z_is_that_of_the_targets(scheme: str) -> None:
    window, model = uneven(), twin(scheme)
    notes = measured([OutputSoftmax()], window, {"scheme": scheme})
    found = [model(batch.tokens_BT).detach().double().logsumexp(-1)[batch.targets_BT != IGNORE] for batch in window]
    assert notes.values[1]["logz_mean"] == pytest.approx(float(torch.cat(found).mean()), rel=1e-5)
    assert notes.values[1]["logz_max"] == pytest.approx(float(torch.cat(found).max()), rel=1e-5)


def test_the_largest_log_z_is_that_of_a_target() -> None:
    probe = OutputSoftmax()
    probe.attach(Subject([], 1, 4, torch.device("cpu"), lambda x: x["x"], lambda: torch.ones(1)))
    probe.begin(1)
    logits = torch.tensor([[[9.0, 9.0], [1.0, 1.0], [2.0, 2.0]]])
    probe.after_forward(logits, torch.tensor([[IGNORE, 0, 1]]))
    probe.after_forward(logits - 5, torch.tensor([[0, IGNORE, IGNORE]]))
    found = collect([probe], lambda x: x, lambda x: x)[0].scalars
    assert found["logz_max"] == pytest.approx(4 + math.log(2))
    assert found["logz_mean"] == pytest.approx((1 + 2 + 4) / 3 + math.log(2))


def test_angles_of_both_sides_are_apart() -> None:
    tokens, source = torch.randint(0, 32, (2, 8)), torch.randint(0, 32, (2, 8))
    options = {"N": 2, "M": 3, "scheme": "pre"}
    notes = measured([Angles()], [MicroBatch(tokens, tokens, source)], options)
    outputs: list[Tensor] = []
    with torch.no_grad():
        build(ModelConfig(**MODEL | options), 32, 0).features(tokens, source_BS=source, outputs=outputs)
    pairs = [*pairwise(outputs[:3]), *pairwise(outputs[3:])]
    want = [float(torch.arccos(torch.cosine_similarity(a.double(), b.double(), dim=-1)).mean()) for a, b in pairs]
    np.testing.assert_allclose(notes.profiles[1, "angle_online"], np.array(want) / math.pi, rtol=1e-5)


def test_angles_are_those_of_every_position_where_all_are_sampled(scheme: str) -> None:
    window, model = uneven(), twin(scheme)
    notes = measured([Angles()], window, {"scheme": scheme})
    seen: list[float] = []
    for block in model.blocks:
        block.register_forward_hook(
            lambda m, args, out: seen.append(
                float(
                    torch.arccos(torch.cosine_similarity(args[0][0].double(), out[0].double(), dim=-1)).mean().detach()
                )
            )
        )
    for batch in window:
        model(batch.tokens_BT)
    want = np.array(seen).reshape(2, 3).mean(axis=0) / math.pi
    np.testing.assert_allclose(notes.profiles[1, "angle_online"], want, rtol=1e-5)
    assert 0 < want.min() < want.max() < 1


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif hasattr(value, "__dict__"):
        yield from tensors(vars(value))


def test_a_thousand_blocks_take_little_memory() -> None:
    sites = [f"decoder.{block:04d}.{kind}" for block in range(1000) for kind in ("self", "ffn")]
    weights = torch.zeros(0)
    spans = [([(4 * i, 4 * i + 4)], [(8000 + i, 8001 + i)]) for i in range(2000)]
    subject = Subject(
        sites,
        2,
        64,
        torch.device("cpu"),
        features=lambda inputs: weights,
        gradient_squares=lambda: torch.zeros(2000),
        parameters=Parameters(
            values=lambda: weights, device=weights.device, sites=spans, split=8000, held=[5] * 2000, spans=[]
        ),
        sums=True,
    )
    total = 0
    for probe in every_probe():
        probe.attach(subject)
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors(vars(probe)))
        total += sum(v.nbytes for v in vars(getattr(probe, "headroom", probe)).values() if isinstance(v, np.ndarray))
    assert total > 1_000_000
    assert total + 4 * ENTRIES < 16_000_000  # with what a step keeps of the weights


def test_all_that_is_said_is_registered_and_keys_are_few() -> None:
    notes = measured(every_probe(), uneven(), {"scheme": "deepnorm"})
    assert set(notes.values[1]) <= set(QUANTITIES)
    assert {name for _, name in notes.profiles} <= set(PROFILES)
    assert all(len(profile) in (3, 6) for profile in notes.profiles.values())
    keys = [quantity.mlflow for quantity in QUANTITIES.values() if quantity.mlflow is not None]
    assert len(set(keys)) == len(keys) <= 80
