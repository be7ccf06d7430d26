"""Batches: the same global batch for every number of ranks and shards, nothing twice, nothing lost unsaid."""

import time
from itertools import pairwise

import datasets
import numpy as np
import pytest
import torch

from normscale.config.schema import DataConfig
from normscale.config.sharing import check_divides
from normscale.data.batches import Batches, batches, held_out_batches, unigram_of
from normscale.data.corpus import build, packed, rows_of
from normscale.data.rows import Row, Source
from normscale.data.task import IGNORE, MicroBatch, Task
from normscale.data.tasks.lm import Windows
from normscale.errors import ConfigError, DataError


def make(train: bytes, held_out: bytes = b"held out text " * 50):
    rows = [Row("t", train, False), Row("h", held_out, True)]
    return build(DataConfig(source="made", max_bytes=None), Source(rows, "by hand"))


def text(n: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8).tobytes()


def sharded(dataset, sizes: list[int]):
    """Returns the same rows as a data set of several shards."""
    ends = np.cumsum([0, *sizes])
    assert ends[-1] == len(dataset)
    parts = [dataset.select(range(a, b)) for a, b in pairwise(ends)]
    return datasets.concatenate_datasets(parts)


def epoch_of(dataset, world: int, batch: int, seed: int = 0, epoch: int = 0, accumulate: int = 1):
    """Returns for each rank the tokens of an epoch, one list of rows a step."""
    ranks = []
    for rank in range(world):
        b = Batches(Windows(dataset), batch=batch, accumulate=accumulate, rank=rank, world=world, seed=seed)
        first = epoch * b.steps_per_epoch
        ranks.append(
            [
                [tuple(row) for micro in b.window(step) for row in micro.tokens_BT.tolist()]
                for step in range(first, first + b.steps_per_epoch)
            ]
        )
    return ranks


@pytest.mark.parametrize(
    ("sizes", "world", "batch"), [([8, 8, 8], 4, 8), ([1, 9, 2, 7, 5], 3, 6), ([24], 2, 8), ([24], 1, 24)]
)
def test_ranks_share_everything_once_whatever_the_shards(sizes, world, batch):
    whole = packed(make(text(24 * 5 + 1)), "train", 5)
    assert len(whole) == 24
    dataset = sharded(whole, sizes)
    ranks = epoch_of(dataset, world, batch)
    assert {len(steps) for steps in ranks} == {24 // batch}
    assert {len(rows) for steps in ranks for rows in steps} == {batch // world}
    seen = [row for steps in ranks for rows in steps for row in rows]
    assert len(seen) == 24
    assert set(seen) == {tuple(row[:-1]) for row in rows_of(whole).tolist()}
    assert ranks == epoch_of(whole, world, batch)


def test_remainder_is_dropped_and_stated():
    dataset = packed(make(text(27 * 5 + 1)), "train", 5)
    b = Batches(Windows(dataset), batch=8, rank=1, world=4, seed=0)
    assert b.facts()["dropped_samples"] == 3
    assert b.facts()["steps_per_epoch"] == 3
    assert "by index" in b.facts()["sharding"]
    ranks = epoch_of(dataset, 4, 8)
    seen = [row for steps in ranks for rows in steps for row in rows]
    assert len(seen) == len(set(seen)) == 24


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (1, 4), (2, 2), (4, 2)])
def test_global_batch_does_not_depend_on_ranks_or_accumulation(world, accumulate):
    dataset = packed(make(text(40 * 5 + 1)), "train", 5)
    (alone,) = epoch_of(dataset, 1, 8, seed=3, epoch=1)
    ranks = epoch_of(dataset, world, 8, seed=3, epoch=1, accumulate=accumulate)
    together = [[row for steps in ranks for row in steps[i]] for i in range(5)]
    assert together == alone


def test_accumulation_splits_the_window():
    b = Batches(Windows(packed(make(text(1001)), "train", 5)), batch=24, accumulate=3, rank=1, world=2, seed=0)
    window = b.window(4)
    assert [tuple(x.tokens_BT.shape) for x in window] == [(4, 5)] * 3
    assert sum(x.n_targets for x in window) * 2 == 24 * 5


def test_order_changes_with_seed_and_epoch():
    orders = {(seed, epoch): batches(40, 8, seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len({order.tobytes() for order in orders.values()}) == 9
    for order in orders.values():
        assert sorted(order.ravel()) == list(range(40))
    assert batches(40, 8, 1, 2).tobytes() == orders[1, 2].tobytes()


def test_order_is_pinned():
    # A change of these numbers changes every run, so it is never an accident.
    assert batches(10, 5, seed=0, epoch=0).tolist() == [[3, 2, 1, 8, 6], [0, 7, 4, 5, 9]]


def test_window_is_a_function_of_the_step_alone():
    dataset = packed(make(text(1001)), "train", 5)
    make_batches = lambda: Batches(Windows(dataset), batch=8, seed=5)  # noqa: E731
    straight = make_batches()
    forward = [straight.window(step)[0].tokens_BT for step in range(80)]  # three epochs
    assert straight.steps_per_epoch == 25
    jumping = make_batches()
    for step in (79, 3, 26, 0, 25, 24):
        assert torch.equal(jumping.window(step)[0].tokens_BT, forward[step])
    assert not torch.equal(forward[0], forward[25])


def test_every_byte_is_a_target_at_most_once_an_epoch():
    b = Batches(Windows(packed(make(bytes(range(256))), "train", 7)), batch=4, seed=1)
    targets = [t for step in range(b.steps_per_epoch) for t in b.window(step)[0].targets_BT.ravel().tolist()]
    assert len(targets) == b.steps_per_epoch * 4 * 7 == 252
    assert len(set(targets)) == 252


def test_targets_are_the_next_byte_of_the_data_sets_rows():
    dataset = packed(make(text(1001)), "train", 9)
    b = Batches(Windows(dataset), batch=4, seed=1)
    for step in (0, 7):
        (micro,) = b.window(step)
        rows = torch.stack([dataset[int(i)]["bytes"] for i in b.samples(step)[0]])  # through `datasets`, row by row
        assert torch.equal(micro.tokens_BT, rows[:, :-1])
        assert torch.equal(micro.targets_BT, rows[:, 1:])
        assert micro.tokens_BT.dtype == micro.targets_BT.dtype == torch.int64
        assert micro.tokens_BT.is_contiguous()
        assert micro.targets_BT.is_contiguous()


def test_takes_shuffled_and_selected_data_sets_as_they_are():
    dataset = packed(make(text(201)), "train", 5).shuffle(seed=3).select(range(4, 30))
    assert rows_of(dataset).tolist() == [row["bytes"].tolist() for row in dataset]


def test_ignored_targets_are_not_counted():
    targets = torch.tensor([[1, IGNORE, 3], [IGNORE, IGNORE, 0]])
    assert MicroBatch(torch.zeros_like(targets), targets).n_targets == 3


@pytest.mark.parametrize(
    ("batch", "world", "accumulate", "near"), [(8, 3, 1, 9), (10, 2, 4, 8), (1, 2, 1, 2), (3, 4, 2, 8)]
)
def test_indivisible_batch_names_numbers_and_nearest(batch, world, accumulate, near):
    with pytest.raises(ConfigError) as e:
        check_divides(batch, world, accumulate)
    assert f"train.batch: {batch} " in str(e.value)
    assert f"{world} ranks x train.accumulate={accumulate}" in str(e.value)
    assert str(e.value).endswith(f"the nearest is {near}")
    with pytest.raises(ConfigError):
        Batches(Windows(packed(make(text(1001)), "train", 5)), batch=batch, accumulate=accumulate, world=world, seed=0)


def test_too_short_for_one_batch():
    dataset = packed(make(text(21)), "train", 5)
    assert Batches(Windows(dataset), batch=4, seed=0).steps_per_epoch == 1
    with pytest.raises(DataError, match=r"train\.batch: 5 is too many; there are 4 sequences"):
        Batches(Windows(dataset), batch=5, seed=0)


def task(corpus, context: int):
    splits = [Windows(packed(corpus, split, context)) for split in ("train", "held_out")]
    return Task("lm", 256, corpus.digest, *splits, np.bincount(corpus.train, minlength=256))


def test_held_out_batches_are_the_held_out_split_in_a_fixed_order():
    corpus = make(text(1001), text(10 * 4 * 5 + 1, seed=1))
    found = held_out_batches(task(corpus, 5), batch=4, n=100)
    assert len(found) == 10
    rows = {tuple(row) for x in found for row in torch.cat([x.tokens_BT, x.targets_BT[:, -1:]], 1).tolist()}
    assert rows == {tuple(row) for row in rows_of(packed(corpus, "held_out", 5)).tolist()}
    few = held_out_batches(task(corpus, 5), batch=4, n=3)
    assert all(torch.equal(a.tokens_BT, b.tokens_BT) for a, b in zip(few, found[:3], strict=True))
    assert few[0].tokens_BT.tolist() != rows_of(packed(corpus, "held_out", 5))[:4, :-1].tolist()


def test_held_out_batches_need_one_batch():
    with pytest.raises(DataError, match=r"train\.batch: 20 is too many; there are 19 held-out sequences"):
        held_out_batches(task(make(text(1001), b"x" * 100), 5), batch=20, n=1)


def test_unigram_of_batches_is_that_of_their_targets():
    corpus = make(text(1001), text(201, seed=1))
    whole = held_out_batches(task(corpus, 5), batch=1, n=1000)
    targets = corpus.held_out[1:]
    seen = np.bincount(corpus.train, minlength=256) + 1
    assert unigram_of(task(corpus, 5), whole) == pytest.approx(-np.log(seen[targets] / seen.sum()).mean(), rel=1e-12)


def test_window_is_cheap():
    b = Batches(Windows(packed(make(text(65 * 10_000)), "train", 64)), batch=8, seed=0)
    b.window(0)
    times = []
    for step in range(200):
        start = time.perf_counter()
        b.window(step)
        times.append(time.perf_counter() - start)
    assert np.median(times) < 1e-3
