"""What holds for every task: samples are functions of their numbers, splits share nothing, ranks agree."""

import shutil
import time

import numpy as np
import pytest
import torch

from normscale.data.batches import Batches, held_out_batches, unigram_of
from normscale.data.corpus import corpus_of
from normscale.data.task import DRAWN, IGNORE, MicroBatch, load_task
from tests.data.made import TASKS, config_of, write_pairs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tasks")


def rows(batch: MicroBatch) -> list[tuple]:
    """Returns everything there is of each sample."""
    tensors = [x for x in batch if x is not None]
    return [tuple(tuple(x[i].tolist()) for x in tensors) for i in range(len(batch.tokens_BT))]


pytestmark = pytest.mark.parametrize("name", TASKS)


def test_shapes_types_and_ranges(name, folder):
    config = config_of(name, folder)
    task = load_task(config)
    for samples in (task.train, task.held_out):
        batch = samples.batch(np.arange(5))
        assert all(x.dtype == torch.int64 for x in (batch.tokens_BT, batch.targets_BT))
        assert all(x.is_contiguous() and x.shape[0] == 5 for x in batch if x is not None)
        assert batch.tokens_BT.shape == batch.targets_BT.shape
        assert batch.tokens_BT.shape[1] <= config.model.context
        assert 0 <= batch.tokens_BT.min() <= batch.tokens_BT.max() < task.vocab
        assert ((batch.targets_BT >= 0) & (batch.targets_BT < task.vocab) | (batch.targets_BT == IGNORE)).all()
        assert (batch.targets_BT != IGNORE).any(dim=1).all()
        assert (batch.source_BS is not None) == (config.topology == "encoder-decoder")
        if batch.source_BS is not None:
            assert batch.source_BS.dtype == torch.int64
            assert 0 <= batch.source_BS.min() <= batch.source_BS.max() < task.vocab
            assert batch.source_BS.shape[1] <= config.model.context
    assert task.facts().items() >= {"task": name, "vocab": task.vocab, "digest": task.digest}.items()
    assert all(isinstance(fact, str | int | float) and not isinstance(fact, np.generic) for fact in task.told.values())


def test_seeds_share_a_task_where_no_sample_depends_on_them(name, folder):
    config = config_of(name, folder)
    one, other = (load_task(config.model_copy(update={"seed": seed})) for seed in (3, 4))
    assert (one is other) == (name not in DRAWN)
    same = rows(one.train.batch(np.arange(5))) == rows(other.train.batch(np.arange(5)))
    assert same == (name not in DRAWN)


def test_a_sample_is_a_function_of_its_number_alone(name, folder):
    task = load_task(config_of(name, folder))
    for samples in (task.train, task.held_out):
        numbers = np.array([9, 0, 3, 9, len(samples) - 1])
        together = rows(samples.batch(numbers))
        assert together == [rows(samples.batch(np.array([n])))[0] for n in numbers]
        assert together[0] == together[3]
        assert len(set(together)) == 4


def test_ranks_and_accumulation_give_the_same_global_batch(name, folder):
    task = load_task(config_of(name, folder))
    alone = Batches(task.train, batch=8, seed=3)
    late = alone.steps_per_epoch + 2  # in the second epoch, which is begun with
    ranks = [Batches(task.train, batch=8, seed=3, accumulate=2, rank=rank, world=2) for rank in range(2)]
    for step in (late, 1):
        together = [row for rank in ranks for micro in rank.window(step) for row in rows(micro)]
        assert together == [row for micro in alone.window(step) for row in rows(micro)]


def test_an_epoch_brings_the_same_samples_again(name, folder):
    if name in ("copy", "reverse"):
        pytest.skip("an epoch of a stream is long")
    task = load_task(config_of(name, folder))
    b = Batches(task.train, batch=len(task.train), seed=0)
    first, second = (rows(b.window(epoch)[0]) for epoch in range(2))
    assert first != second
    assert sorted(first) == sorted(second)


def test_seeds_differ_in_training_and_are_judged_on_the_same(name, folder):
    one, other = (load_task(config_of(name, folder, seed=seed)) for seed in (1, 2))
    judged = [held_out_batches(task, 4, 3) for task in (one, other)]
    assert [rows(x) for x in judged[0]] == [rows(x) for x in judged[1]]
    assert unigram_of(one, judged[0]) == unigram_of(other, judged[1])
    trained = [rows(task.train.batch(np.arange(8))) for task in (one, other)]
    assert (trained[0] != trained[1]) == (name in ("mlm", "span", "copy", "reverse"))


def test_frequencies_are_those_of_training_targets(name, folder):
    task = load_task(config_of(name, folder))
    batch = task.train.batch(np.arange(min(len(task.train), 2000)))
    positions, by_position = batch.targets_BT.shape[1], task.frequencies.ndim == 2
    assert by_position == (name == "span")
    assert task.frequencies.shape == ((positions, task.vocab) if by_position else (task.vocab,))
    columns = list(batch.targets_BT.T) if by_position else [batch.targets_BT]
    for frequencies, column in zip(np.atleast_2d(task.frequencies), columns, strict=True):
        targets = column[column != IGNORE].numpy()
        seen = np.bincount(targets, minlength=task.vocab) / targets.size
        told = frequencies / frequencies.sum()
        assert np.abs(seen - told).max() < 5 * np.sqrt(told.max() / targets.size)
        assert set(np.flatnonzero(seen)) <= set(np.flatnonzero(told))


def test_the_splits_share_no_text(name, folder):
    task = load_task(config_of(name, folder, data={"held_out": 0.3} if name in ("lm", "mlm", "span") else {}))
    if name in ("lm", "mlm", "span"):
        corpus = corpus_of(config_of(name, folder, data={"held_out": 0.3}).data)
        # What is hidden or read of a sample are bytes of its own split, at its own place.
        for split, samples in (("train", task.train), ("held_out", task.held_out)):
            text = getattr(corpus, split)
            for number in (0, 5, len(samples) - 1):
                row = set(text[16 * number : 16 * number + 17].tolist())
                batch = samples.batch(np.array([number]))
                for tensor in (batch.tokens_BT, batch.targets_BT):
                    found = {token for token in tensor.ravel().tolist() if 0 <= token < 256}
                    assert len(found - row) <= (1 if name == "mlm" else 0)  # a random byte may be another
    else:
        sizes = [min(len(samples), 20_000) for samples in (task.train, task.held_out)]
        sides = [
            {tuple(row) for row in samples.batch(np.arange(size)).source_BS.tolist()}
            for samples, size in zip((task.train, task.held_out), sizes, strict=True)
        ]
        assert sides[0]
        assert sides[1]
        assert not sides[0] & sides[1]


def test_the_digest_follows_the_data_and_not_its_place(name, folder, tmp_path):
    here = load_task(config_of(name, folder))
    for file in folder.iterdir():
        shutil.copy(file, tmp_path)
    moved = load_task(config_of(name, tmp_path))
    assert moved.digest == here.digest
    assert rows(moved.train.batch(np.arange(9))) == rows(here.train.batch(np.arange(9)))
    (tmp_path / "text.txt").write_bytes((folder / "text.txt").read_bytes()[1:])
    write_pairs(tmp_path / "pairs", 400, seed=1)
    corpus_of.cache_clear()
    other = {"data": {"symbols": 31}} if name in ("copy", "reverse") else {"train": {"batch": 5}}  # which is not cached
    assert load_task(config_of(name, tmp_path, **other)).digest != here.digest


def test_a_window_is_cheap(name, folder):
    task = load_task(config_of(name, folder, model={"context": 64}, train={"batch": 8}))
    b = Batches(task.train, batch=8, seed=0)
    times = []
    for step in range(60):
        start = time.perf_counter()
        b.window(step)
        times.append(time.perf_counter() - start)
    assert np.median(times) < 2e-3
