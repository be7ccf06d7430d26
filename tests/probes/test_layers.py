"""What each block is worth, against a plain computation."""

import numpy as np
import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.data.task import IGNORE, MicroBatch
from normscale.models.builder import build
from normscale.probes.gradients import Gradients
from normscale.probes.layers import Layers, spread_over
from normscale.probes.probe import Subject, collect
from normscale.train.loop import summed_loss
from tests.probes.test_probes import MODEL, trained, windows

TOKENS = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(5))


def batches() -> list[tuple[dict[str, Tensor], Tensor]]:
    targets = TOKENS[:, 1:].clone()
    targets[0, :] = targets[1, :5] = IGNORE  # few, beside those of the second batch
    return [({"tokens_BT": TOKENS[:2, :-1]}, targets[:2]), ({"tokens_BT": TOKENS[2:, :-1]}, targets[2:])]


@pytest.mark.parametrize("scheme", ["pre", "deepnorm"])
def test_angle_and_removal_are_those_of_the_trained_blocks(scheme: str) -> None:
    probe = Layers(batches(), step=3)
    trainer, notes = trained([probe], steps=3, model={"scheme": scheme})
    assert {key for key in notes.profiles if key[1] in ("angle", "removal")} == {(3, "angle"), (3, "removal")}
    model = trainer.engine.inner.eval()
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = [
        block.register_forward_hook(lambda m, args, out: seen.append((args[0][0], out[0]))) for block in model.blocks
    ]
    with torch.no_grad():
        tokens = TOKENS[:, :-1]
        model(tokens)
        for hook in hooks:
            hook.remove()
        cosines = [torch.cosine_similarity(x.double(), y.double(), dim=-1) for x, y in seen]
        angles = [float(torch.arccos(cosine).mean()) / np.pi for cosine in cosines]

        def loss() -> float:
            pairs = [(model(x["tokens_BT"]), y) for x, y in batches()]
            logits, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))  # as of one batch
            return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))

        whole, without = loss(), []
        for i in range(3):
            kept = model.blocks[i].forward
            model.blocks[i].forward = lambda streams, *_: streams
            without.append(loss() - whole)
            model.blocks[i].forward = kept
    np.testing.assert_allclose(notes.profiles[3, "angle"], angles, rtol=1e-5)
    np.testing.assert_allclose(notes.profiles[3, "removal"], without, atol=1e-6)
    assert min(abs(number) for number in without) > 1e-4
    assert 0 < min(angles) < max(angles) < 1


def test_it_changes_no_bit_of_the_training() -> None:
    plain, _ = trained([], steps=3, model={"dropout": 0.2})
    probed, _ = trained([Layers(batches(), step=2)], steps=3, model={"dropout": 0.2})
    assert torch.equal(plain.engine.flat.values, probed.engine.flat.values)


def subject(**changes: object) -> Subject:
    fields = {
        "sites": list("abcd"),
        "streams": 1,
        "width": 2,
        "device": torch.device("cpu"),
        "features": lambda inputs: inputs["tokens_BT"],
        "gradient_squares": lambda: torch.ones(4),
    }
    return Subject(**{**fields, **changes})  # type: ignore[arg-type]


def measured(blocks: int, losses: dict[int | None, float]) -> dict[str, np.ndarray]:
    """Returns what the probe says of a model whose blocks turn the stream by a right angle each."""
    turned = [torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 3.0]]])]
    probe = Layers([({"tokens_BT": TOKENS}, TOKENS)], step=1)
    probe.attach(
        subject(
            streams_between=lambda inputs: [[turned[i % 2] for i in range(blocks + 1)]],
            loss=lambda inputs, targets, skip: (4 * torch.tensor(losses.get(skip, 5.0)), torch.tensor(4)),
        )
    )
    probe.after_step(1)
    return collect([probe], lambda x: x, lambda x: x)[0].profiles


def test_a_right_angle_is_half_of_a_half_turn_whatever_the_lengths() -> None:
    assert measured(3, {})["angle"].tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_blocks_that_are_not_tried_are_nan_and_losses_that_are_not_finite_infinite(bad: float) -> None:
    removal = measured(40, {None: 2.0, 0: 2.5, 39: bad})["removal"]
    tried = np.flatnonzero(~np.isnan(removal))
    assert tried.tolist() == spread_over(40, 16)
    assert (removal[0], removal[tried[1]], removal[39]) == (0.5, 3.0, np.inf)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_model_whose_loss_is_not_finite_has_no_removal(bad: float) -> None:
    assert np.isnan(measured(3, {None: bad, 1: bad})["removal"]).all()


def test_blocks_are_spread_over_the_depth() -> None:
    assert spread_over(5, 16) == [0, 1, 2, 3, 4]
    for n in (17, 24, 100, 1000):
        spread = spread_over(n, 16)
        assert (len(set(spread)), spread[0], spread[-1]) == (16, 0, n - 1)
        assert max(np.diff(spread)) - min(np.diff(spread)) <= 1


def test_two_sides_have_streams_of_their_own() -> None:
    """The decoder's first block is not compared with what the encoder left."""
    from normscale.config.schema import RunConfig
    from normscale.train.engines.plain import PlainEngine
    from normscale.train.observe import subject_of

    config = RunConfig(model={**MODEL, "N": 2, "M": 1}, data={"task": "copy"})
    engine = PlainEngine(build(config.model, 32, 0), config.precision, torch.device("cpu"))
    own = subject_of(engine)
    assert own.streams_between is not None
    batch = MicroBatch(TOKENS[:, :-1], TOKENS[:, 1:], source_BS=TOKENS[:, :-1].flip(1))
    encoder, decoder = own.streams_between(batch.inputs)
    assert (len(encoder), len(decoder)) == (3, 2)
    probe = Layers([(batch.inputs, batch.targets_BT)], step=1)
    probe.attach(own)
    probe.after_step(1)
    reading = collect([probe], lambda x: x, lambda x: x)[0].profiles
    assert (len(reading["angle"]), len(reading["removal"])) == (3, 3)
    assert np.isfinite(reading["removal"]).all()


def test_the_last_output_matrix_has_the_gradient_of_plain_autograd() -> None:
    _, notes = trained([Gradients()], steps=1, model={"scheme": "pre"})
    model = build(ModelConfig(**MODEL, scheme="pre"), 32, 0)
    batch = windows(1)[0][0]
    (summed_loss(model(batch.tokens_BT), batch.targets_BT) / batch.n_targets).backward()
    wanted = model.sublayers()[-1].branch.out.weight.grad.norm()
    assert notes.values[1]["grad_last_out"] == pytest.approx(float(wanted), rel=1e-5)


def test_without_a_way_to_the_matrix_there_is_no_number() -> None:
    probe = Gradients()
    probe.attach(subject())
    probe.after_backward()
    assert "grad_last_out" not in collect([probe], lambda x: x, lambda x: x)[0].scalars
    probe.attach(subject(last_out_square=lambda: torch.tensor([9.0])))
    probe.after_backward()
    assert collect([probe], lambda x: x, lambda x: x)[0].scalars["grad_last_out"] == 3.0
