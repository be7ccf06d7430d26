"""Masked language modelling: what is hidden, how, and what is asked for."""

import numpy as np
import pytest
import torch

from normscale.data.batches import held_out_batches, unigram_of
from normscale.data.corpus import corpus_of
from normscale.data.draws import Draws
from normscale.data.task import IGNORE, load_task
from normscale.data.tasks.mlm import MASK, Masked, hidden_tokens
from normscale.errors import DataError
from tests.data.made import config_of


@pytest.mark.parametrize(
    ("context", "noise", "hidden"),
    [(64, 0.15, 10), (128, 0.15, 19), (64, 0.5, 32), (8, 0.001, 1), (8, 0.999, 7), (1, 0.5, 1)],
)
def test_how_many_are_hidden(context, noise, hidden):
    assert hidden_tokens(context, noise) == hidden


def test_targets_are_the_hidden_bytes_and_all_else_is_as_it_was():
    rows = np.random.default_rng(0).integers(0, 256, (300, 20), dtype=np.uint8)
    batch = Masked(rows, Draws(0, "train"), hidden=6).batch(np.arange(300))
    tokens, targets = batch.tokens_BT.numpy(), batch.targets_BT.numpy()
    asked = targets != IGNORE
    assert (asked.sum(axis=1) == 6).all()
    assert (targets[asked] == rows[asked]).all()
    assert (tokens[~asked] == rows[~asked]).all()
    assert MASK not in tokens[~asked]
    assert batch.source_BS is batch.segments_BT is None


def test_eight_of_ten_are_masked_one_is_random_and_one_stays():
    n = 4000
    rows = np.zeros((n, 40), dtype=np.uint8)  # so that a random byte shows, but for 1 in 256
    batch = Masked(rows, Draws(1, "train"), hidden=10).batch(np.arange(n))
    tokens = batch.tokens_BT.numpy()[batch.targets_BT.numpy() != IGNORE]
    shares = np.array([(tokens == MASK).mean(), ((tokens != MASK) & (tokens != 0)).mean(), (tokens == 0).mean()])
    bound = 4 * np.sqrt(0.25 / tokens.size)
    assert shares == pytest.approx([0.8, 0.1 * 255 / 256, 0.1 + 0.1 / 256], abs=bound)
    random = tokens[(tokens != MASK) & (tokens != 0)]
    assert ((np.bincount(random, minlength=256)[1:] - random.size / 255) ** 2 / (random.size / 255)).sum() < 350
    places = (batch.targets_BT != IGNORE).numpy().mean(axis=0)  # each place of the row is as likely
    assert np.abs(places - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / n)


def test_held_out_is_judged_on_masks_alone(tmp_path):
    task = load_task(config_of("mlm", tmp_path, data={"noise": 0.3}))
    for batch in held_out_batches(task, 8, 4):
        asked = batch.targets_BT != IGNORE
        assert (batch.tokens_BT[asked] == MASK).all()
        assert (asked.sum(dim=1) == 5).all()


def test_segments_are_equal_pieces_in_order(tmp_path):
    halves = load_task(config_of("mlm", tmp_path, model={"segments": 2})).train.batch(np.arange(3))
    assert halves.segments_BT.tolist() == [[0] * 8 + [1] * 8] * 3
    assert halves.inputs.keys() == {"tokens_BT", "segments_BT"}
    thirds = load_task(config_of("mlm", tmp_path, model={"segments": 3})).held_out.batch(np.arange(1))
    assert thirds.segments_BT.tolist() == [[0] * 6 + [1] * 5 + [2] * 5]
    assert torch.equal(halves.tokens_BT, load_task(config_of("mlm", tmp_path)).train.batch(np.arange(3)).tokens_BT)


def test_the_unigram_entropy_is_that_of_the_hidden_bytes(tmp_path):
    config = config_of("mlm", tmp_path)
    task = load_task(config)
    batches = held_out_batches(task, 4, 3)
    train = corpus_of(config.data).train
    targets = np.concatenate([x.targets_BT[x.targets_BT != IGNORE].numpy() for x in batches])
    assert targets.size == 3 * 4 * 2  # two of 16 are hidden
    p = np.bincount(train, minlength=257) / train.size
    assert unigram_of(task, batches) == pytest.approx(-np.log(p[targets]).mean(), abs=0.02)  # smoothed by one


def test_too_short_says_so(tmp_path):
    with pytest.raises(DataError, match=r"one batch of 300 x 16 needs 4801 bytes .* held-out 4000"):
        load_task(config_of("mlm", tmp_path, train={"batch": 300}))
