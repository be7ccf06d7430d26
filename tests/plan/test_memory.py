"""The predicted peak against what PyTorch's own tracker sees of a real training step."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.data.batches import Batches
from normscale.data.task import MicroBatch, load_task
from normscale.models import skeleton as skeleton_module
from normscale.models.builder import build
from normscale.models.skeleton import skeleton
from normscale.plan import trace
from normscale.plan.engines import Size, memory
from normscale.plan.trace import Pass, footprint
from normscale.schemes import scheme_names
from normscale.train.engines.plain import PlainEngine
from normscale.train.flops import Lengths
from normscale.train.loop import Trainer
from normscale.train.meter import lengths_seen

CPU = torch.device("cpu")
BASE = RunConfig.model_validate(
    {"model": {"d": 64, "heads": 4, "context": 64, "M": 5}, "train": {"batch": 8, "steps": 50}}
)
BOTH = {"model.N": 4, "model.M": 4, "data.task": "copy"}
AGAIN = {"model.checkpointing": True}
BF16 = {"precision.compute": "bf16"}
CASES: dict[str, dict[str, Any]] = {
    "decoder": {},
    "encoder": {"model.N": 5, "model.M": 0},
    "both": BOTH,
    "decoder, again": AGAIN,
    "both, again": BOTH | AGAIN,
    "decoder, bf16": BF16,
    "decoder, bf16, again": BF16 | AGAIN,
    "both, bf16, again": BOTH | BF16 | AGAIN,
    "sgd": {"train.optim.name": "sgd"},
    "sgd with momentum": {"train.optim.name": "sgd", "train.optim.momentum": 0.9},
    "weights outweigh": {"model.M": 24, "train.batch": 1},
    "dropout": {"model.dropout": 0.1},
    "gated, rms": {
        "model.scheme": "pre",
        "model.activation": "swiglu",
        "model.norm": "rmsnorm",
        "model.qk_norm": "head",
    },
    "bf16 stream": BF16 | {"precision.stream": "bf16"},
    "fp8": {"precision.compute": "fp8_e4m3"},
}


class Silent:
    def metrics(self, *_: Any) -> None: ...

    def profile(self, *_: Any) -> None: ...

    def event(self, *_: Any, **__: Any) -> None: ...

    def ledger(self, *_: Any) -> None: ...


class NoModules:
    """In the place of the tracker's hooks on modules, which keep recomputed graphs alive (a tenth more, in bf16)."""

    is_bw, parents = False, frozenset[str]()

    def register_user_hooks(self, *_: Any) -> None: ...

    def clear_user_hooks(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def tracked(config: RunConfig) -> tuple[int, int, Sequence[MicroBatch]]:
    """Returns the peak of the second step in bytes, the vocabulary, and the window."""
    task = load_task(config)
    engine = PlainEngine(build(config.model, task.vocab, 0), config.precision, CPU)
    trainer = Trainer(engine, config, [])
    batches = Batches(task.train, batch=config.train.batch, seed=0)
    trainer.step(batches.window(0), Silent())  # the optimizer has its state after it
    window = batches.window(1)
    tracker = MemTracker()
    tracker._mod_tracker = NoModules()  # type: ignore[assignment]
    tracker.track_external(engine.inner, engine.flat.values, engine.flat.grads, engine.optimizer)
    with tracker:
        trainer.step(window, Silent())
    return int(tracker.get_tracker_snapshot("peak")[CPU]["Total"]), task.vocab, window


def predicted(config: RunConfig, vocab: int, lengths: Lengths) -> tuple[int, int]:
    """Returns the bytes beside activations, and those of activations."""
    found = skeleton(config.model, vocab)
    optim = config.train.optim
    momenta = 2 if optim.name == "adamw" else int(optim.momentum > 0)
    size = Size(sum(found.parameters().values()), 0, 0, momenta, 1)
    run = Pass(config.train.batch, lengths, "cpu", config.model.checkpointing)
    return memory(config, size).bytes, footprint(found, config, run).bytes


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_what_the_tracker_sees(name: str) -> None:
    config = revise(BASE, CASES[name])
    peak, vocab, window = tracked(config)
    own, activations = predicted(config, vocab, lengths_seen(window[0]))
    assert own + activations == pytest.approx(
        peak, rel=0.01
    )  # within 10 % was asked for; it is exact but for the batch
    assert activations == pytest.approx(peak - own, rel=0.02)  # not only because weights outweigh


def test_an_optimizer_that_is_forgotten_shows() -> None:
    peak, vocab, window = tracked(BASE)
    own, activations = predicted(revise(BASE, {"train.optim.name": "sgd"}), vocab, lengths_seen(window[0]))
    assert own + activations < 0.9 * peak


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("changes", [{}, AGAIN, BF16, BF16 | AGAIN, BF16 | AGAIN | {"model.dropout": 0.1}], ids=str)
def test_two_blocks_of_each_kind_say_what_all_do(
    device: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = revise(BASE, BOTH | changes)
    run = Pass(8, Lengths(64, 64), device, config.model.checkpointing)
    few = footprint(skeleton(config.model, 40), config, run)
    for module in (skeleton_module, trace):
        monkeypatch.setattr(module, "SHOWN", 99)
    found = skeleton(config.model, 40)
    assert len(found.model.blocks) == 8
    assert few.bytes == footprint(found, config, run).bytes


@pytest.mark.parametrize("scheme", scheme_names())
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_scheme_can_be_planned(scheme: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = revise(BASE, {"model.scheme": scheme, "model.M": 6})
    run = Pass(4, Lengths(64), device)
    few = footprint(skeleton(config.model, 40), config, run)
    for module in (skeleton_module, trace):
        monkeypatch.setattr(module, "SHOWN", 99)
    assert few.bytes == pytest.approx(footprint(skeleton(config.model, 40), config, run).bytes, rel=0.01)


def test_a_gpu_keeps_neither_scores_nor_wide_masks() -> None:
    config = revise(BASE, {"model.dropout": 0.1})
    found = skeleton(config.model, 40)
    cpu, cuda = (footprint(found, config, Pass(8, Lengths(64), device)).bytes for device in ("cpu", "cuda"))
    assert cuda < 0.8 * cpu


def test_a_bf16_pass_keeps_copies_of_weights_and_a_checkpointed_one_does_not() -> None:
    config = revise(BASE, BF16)
    found = skeleton(config.model, 40)
    matrices = sum(p.numel() for n, p in found.model.named_parameters() if p.dim() == 2 and "blocks" in n) / 2 * 5
    kept, again = (footprint(found, config, Pass(8, Lengths(64), "cuda", each)).kept for each in (False, True))
    assert kept["casts"] == pytest.approx(2 * matrices, rel=0.02)
    assert again["casts"] < 0.1 * kept["casts"]


def test_an_evaluation_keeps_nothing_of_blocks() -> None:
    found = skeleton(revise(BASE, {"model.M": 100}).model, 40)
    run = Pass(8, Lengths(64), "cpu", backward=False)
    shallow = footprint(skeleton(BASE.model, 40), BASE, run)
    assert footprint(found, BASE, run).bytes == pytest.approx(shallow.bytes, rel=0.01)
