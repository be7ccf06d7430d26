"""Copy and reverse: what is read, what is to be said, and that nothing can be learned by heart."""

import math

import numpy as np
import pytest
import torch

from normscale.data.batches import Batches, held_out_batches, unigram_of
from normscale.data.draws import Draws
from normscale.data.task import load_task
from normscale.data.tasks.copy import SAMPLES, Symbols, side
from normscale.errors import ConfigError, DataError
from tests.data.made import config_of


@pytest.mark.parametrize("name", ["copy", "reverse"])
def test_the_target_is_the_source_and_the_decoder_is_told_what_it_has_said(name, tmp_path):
    task = load_task(config_of(name, tmp_path, data={"symbols": 20}))
    batch = task.train.batch(np.arange(50))
    assert torch.equal(batch.targets_BT, batch.source_BS.flip(1) if name == "reverse" else batch.source_BS)
    assert batch.tokens_BT[:, 0].tolist() == [20] * 50
    assert torch.equal(batch.tokens_BT[:, 1:], batch.targets_BT[:, :-1])
    assert (task.vocab, batch.source_keep_BS) == (21, None)
    assert task.facts()["symbols"] == 20


def test_copy_and_reverse_read_the_same_but_are_not_the_same(tmp_path):
    one, other = (load_task(config_of(name, tmp_path)) for name in ("copy", "reverse"))
    assert torch.equal(one.train.batch(np.arange(9)).source_BS, other.train.batch(np.arange(9)).source_BS)
    assert one.digest != other.digest


def test_symbols_are_uniform_and_independent():
    symbols = Symbols(Draws(0, "train"), "train", symbols=5, context=20, backwards=False)
    rows = symbols.rows(np.arange(10_000))
    for counts in (
        np.bincount(rows.ravel(), minlength=5),
        np.bincount(rows[:, -1], minlength=5),
        np.bincount(rows[:, 0] * 5 + rows[:, 1], minlength=25),
        np.bincount((rows.sum(axis=1)) % 5, minlength=5),  # what decides on the split is no pattern in the symbols
    ):
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < counts.size + 5 * math.sqrt(2 * counts.size)


def test_the_splits_share_no_row_even_where_there_are_few():
    def rows(split, seed):
        symbols = Symbols(Draws(seed, split), split, symbols=2, context=10, backwards=False)
        return {tuple(row) for row in symbols.rows(np.arange(20_000)).tolist()}

    train, held_out = rows("train", 0), rows("held_out", 0)
    assert not (train | rows("train", 1)) & held_out
    assert len(train) + len(held_out) == 1024  # every row is in one of them
    assert 400 < len(train) < 624
    assert {int(side(np.array([row], dtype=np.uint64))[0]) for row in train} == {0}


def test_rows_that_could_be_learned_by_heart_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"2 symbols make only 65536 different rows of model\.context=16") as e:
        load_task(config_of("copy", tmp_path, data={"symbols": 2}))
    assert e.value.key == "data.symbols"
    load_task(config_of("copy", tmp_path, data={"symbols": 4}))  # 2^32


def test_the_unigram_entropy_is_the_logarithm_of_the_symbols(tmp_path):
    task = load_task(config_of("copy", tmp_path))
    assert unigram_of(task, held_out_batches(task, 4, 3)) == pytest.approx(math.log(32), abs=1e-5)


def test_a_batch_may_be_the_whole_stream_but_not_more(tmp_path):
    task = load_task(config_of("copy", tmp_path))
    assert Batches(task.train, batch=SAMPLES["train"], seed=0).steps_per_epoch == 1
    with pytest.raises(DataError, match=r"train\.batch: 262145 is too many; there are 262144 sequences"):
        Batches(task.train, batch=SAMPLES["train"] + 1, seed=0)
