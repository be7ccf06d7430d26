"""What the seed decides, and that what a run reports at its end is true."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normscale.data.batches import held_out_batches
from normscale.data.corpus import corpus_of
from normscale.data.task import load_task
from normscale.models.builder import build
from normscale.schemes import Depth, Make, Own, Parts, Scheme, Site, Streams, registry
from normscale.tracking.reader import read_run
from normscale.train.loop import Trainer
from normscale.train.run import run
from tests.train.test_run import config

SMALL = {"M": 2, "d": 16, "heads": 2, "context": 16}


def first_step(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """What a run begins with: its first batch, its initial weights, and the first dropout mask."""
    seen: dict[str, Tensor] = {}
    original = Trainer.step

    def step(self, window, recorder):  # type: ignore[no-untyped-def]
        seen["batch"], seen["weights"] = window[0][0], self.engine.flat.values.clone()
        hook = self.engine.inner.dropout.register_forward_hook(lambda m, a, out: seen.update(mask=out == 0))
        result = original(self, window, recorder)
        hook.remove()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        train = {"steps": 1, "batch": 4, "eval_batches": 1}
        run(config(tmp_path, seed=seed, model=SMALL | {"dropout": 0.5}, train=train, probes={"every": 1}), fresh=True)
    return seen


def test_the_seed_decides_batches_weights_and_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    one = first_step(tmp_path, 0, monkeypatch)
    torch.manual_seed(2)
    same, other = first_step(tmp_path, 0, monkeypatch), first_step(tmp_path, 1, monkeypatch)
    for name in ("batch", "weights", "mask"):
        assert torch.equal(one[name], same[name]), name
        assert not torch.equal(one[name], other[name]), name
    assert 0.4 < float(one["mask"].float().mean()) < 0.6


def unigram(train: np.ndarray, targets: Tensor) -> float:
    """The cross-entropy of the targets under the training text's byte frequencies, each count one higher."""
    counts = np.bincount(train, minlength=256) + 1.0
    return float(-np.log(counts / counts.sum())[targets.numpy()].mean())


def test_the_gap_is_how_far_the_loss_is_below_the_unigram_entropy_of_the_same_batches(tmp_path: Path) -> None:
    settings = config(tmp_path)
    result = run(settings)
    record, corpus = read_run(result.run_dir), corpus_of(settings.data)
    batches = held_out_batches(load_task(settings), 4, 2)
    targets = torch.cat([batch.targets_BT for batch in batches])
    nats = unigram(corpus.train, targets)
    assert record.start["data"]["unigram_nats"] == pytest.approx(nats, rel=1e-6)
    assert abs(nats - unigram(corpus.train, torch.from_numpy(corpus.held_out.astype(np.int64)))) > 1e-3
    with torch.no_grad():
        fresh = build(settings.model, 256, settings.seed)(torch.cat([batch.tokens_BT for batch in batches]))
    loss = float(F.cross_entropy(fresh.flatten(0, 1), targets.flatten()))
    assert record.series["loss_val"].values[0] == pytest.approx(loss, rel=1e-5)
    wanted = [nats - value for value in record.series["loss_val"].values]
    assert record.series["loss_gap"].values == pytest.approx(wanted, rel=1e-5)
    summary = result.summary
    assert summary["loss_val"] == record.series["loss_val"].values[-1]
    assert (summary["unigram_nats"], summary["gap"]) == pytest.approx((nats, nats - summary["loss_val"]))


def test_the_summary_is_that_of_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []
    result = run(config(tmp_path), on_step=lambda step, steps, loss: losses.append(loss))
    record, summary = read_run(result.run_dir), result.summary
    profile = record.profiles["grad_norm"].data[-1].astype(float)
    x, y = np.log(np.arange(1, 5)), np.log(profile)
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    assert summary["grad_slope"] == pytest.approx(slope, rel=1e-5)
    assert summary["grad_min_end"] == pytest.approx(profile.min(), rel=1e-6)
    assert len({float(profile.min()), *profile[[0, -1]]}) == 3  # neither the first nor the last
    assert (summary["loss_train"], len(losses)) == (losses[-1], 6)
    assert (summary["steps"], summary["applied"], summary["skipped"], summary["spike"]) == (6, 6, 0, 0.0)
    assert 0 < summary["train_seconds"] < summary["seconds"]
    assert (record.start["model"]["structures"], summary["graphs"]) == (1, 0)
    assert record.start["model"]["params"] == sum(p.numel() for p in build(config(tmp_path).model, 256, 0).parameters())


def test_the_spike_share_of_a_run_counts_its_bad_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer.step

    def step(self, window, recorder):  # type: ignore[no-untyped-def]
        inner = self.engine.inner
        self.engine.model = lambda tokens, rows: inner(tokens, rows) * (math.nan if self.attempted == 2 else 1.0)
        return original(self, window, recorder)

    monkeypatch.setattr(Trainer, "step", step)
    train = {"steps": 5, "batch": 4, "eval_batches": 1, "on_nonfinite": "skip"}
    summary = run(config(tmp_path, train=train, probes={"every": 1})).summary
    assert (summary["spike"], summary["skipped"], summary["applied"]) == (1 / 5, 1, 4)


class Uneven(Scheme):
    """The first block owns a constant that the others do not: two structures."""

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        return {"alpha": 2.0} if site.block == 0 else {}

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        return (streams[0] + (own.tensor("alpha") * out if own.has("alpha") else out),)


def test_structures_and_graphs_are_counted_by_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    compile_: Callable[..., object] = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile_(f, backend="eager"))
    monkeypatch.setitem(registry.SCHEMES.classes, "guest", Uneven)
    counters["stats"]["unique_graphs"] += 1000  # of others before
    train = {"steps": 1, "batch": 4, "eval_batches": 1}
    model = SMALL | {"M": 3, "scheme": "guest", "compile": True}
    result = run(config(tmp_path, model=model, train=train, probes={"every": 100}))
    assert read_run(result.run_dir).start["model"]["structures"] == 2
    assert result.summary["graphs"] == 2 * 2  # each in evaluation and in a measured step
