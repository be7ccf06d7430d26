"""Span corruption: nothing is lost, nothing hidden shows, every row has the same lengths."""

from itertools import product

import numpy as np
import pytest
import torch

from normscale.config.schema import RunConfig
from normscale.data.batches import Batches, held_out_batches, unigram_of
from normscale.data.draws import Draws
from normscale.data.task import load_task
from normscale.data.tasks.span import BEGIN, END, SENTINEL, Sizes, Spans, sentinel_places, sizes_of, span_mask
from normscale.errors import ConfigError
from tests.data.made import config_of


def restored(source: list[int], target: list[int]) -> list[int]:
    """Puts the spans of a target back where their sentinels stand in the source."""
    assert target[-1] == END
    spans: dict[int, list[int]] = {}
    for token in target[:-1]:
        if token >= SENTINEL:
            spans[token] = []
            last = token
        else:
            spans[last].append(token)
    return [byte for token in source for byte in (spans.pop(token) if token >= SENTINEL else [token])]


@pytest.mark.parametrize(
    ("context", "noise", "span", "sizes"),
    [
        (512, 0.15, 3, (77, 26, 461, 104)),  # round(76.8), round(25.67)
        (64, 0.15, 3, (10, 3, 57, 14)),
        (64, 0.5, 3, (32, 11, 43, 44)),
        (16, 0.15, 3, (2, 1, 15, 4)),
        (4, 0.01, 50, (1, 1, 4, 3)),  # never none
        (8, 0.99, 8, (7, 1, 2, 9)),  # never all; the target would be longer than the context
    ],
)
def test_sizes(tmp_path, context, noise, span, sizes):
    config = config_of("span", tmp_path, model={"context": context}, data={"noise": noise, "span": span})
    if sizes[3] > context:
        with pytest.raises(ConfigError) as e:
            sizes_of(config)
        assert e.value.key == "data.noise"
        assert "hides 7 of model.context=8 tokens" in str(e.value)
        assert "target would be 9 tokens" in str(e.value)
        assert all(key in str(e.value) for key in ("data.noise", "data.span", "model.context"))
    else:
        found = sizes_of(config)
        assert (found.hidden, found.spans, found.source, found.target) == sizes


def test_too_many_spans_are_refused_when_the_task_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"hides 10 of model\.context=16 tokens, with data\.span=1 in 10 spans"):
        load_task(config_of("span", tmp_path, data={"noise": 0.6, "span": 1}))


@pytest.mark.parametrize("noise", [0.05, 0.15, 0.6])
def test_source_and_target_make_the_row_again(noise):
    rows = np.random.default_rng(0).integers(0, 256, (50, 40), dtype=np.uint8)
    hidden = round(40 * noise)
    sizes = Sizes(40, hidden, max(1, hidden // 3))
    batch = Spans(rows, Draws(1, "train"), sizes).batch(np.arange(50))
    assert batch.source_BS.shape == (50, sizes.source)
    assert batch.targets_BT.shape == (50, sizes.target)
    for row, source, target in zip(rows, batch.source_BS.tolist(), batch.targets_BT.tolist(), strict=True):
        assert restored(source, target) == row.tolist()
        for tokens in (source, target):  # sentinels in order, each once
            sentinels = [token for token in tokens if token >= SENTINEL]
            assert sentinels == list(range(SENTINEL, SENTINEL + sizes.spans))


def test_hidden_bytes_are_not_in_the_source_and_the_decoder_reads_what_it_has_said():
    rows = np.arange(256, dtype=np.uint8).reshape(4, 64)  # every byte once, so that a leak shows
    batch = Spans(rows, Draws(0, "train"), Sizes(64, 20, 6)).batch(np.arange(4))
    for source, target in zip(batch.source_BS.tolist(), batch.targets_BT.tolist(), strict=True):
        assert not {x for x in source if x < 256} & {x for x in target if x < 256}
    assert batch.tokens_BT[:, 0].tolist() == [BEGIN] * 4
    assert torch.equal(batch.tokens_BT[:, 1:], batch.targets_BT[:, :-1])


def test_every_arrangement_is_equally_likely():
    # Three of six tokens in two spans that do not touch: the lengths are 1+2 or 2+1, and the three visible tokens lie
    # before, between and after with at least one between: 2 x 6 arrangements.
    sizes = Sizes(6, 3, 2)
    masks = span_mask(Draws(0, "train").raw(np.arange(24_000), 6), sizes)
    counts = np.bincount(masks @ 2 ** np.arange(6), minlength=64)
    spans = lambda bits: sum(a and not b for a, b in zip(bits, (0, *bits[:-1]), strict=True))  # noqa: E731
    possible = [bits for bits in product((0, 1), repeat=6) if sum(bits) == 3 and spans(bits) == 2]
    assert len(possible) == 12
    expected = np.array([counts[np.array(bits) @ 2 ** np.arange(6)] for bits in possible])
    assert expected.sum() == 24_000
    assert ((expected - 2000) ** 2 / 2000).sum() < 38  # 11 degrees of freedom: 1 in 10^4


def test_a_single_span_may_stand_anywhere():
    masks = span_mask(Draws(0, "train").raw(np.arange(500), 6), Sizes(6, 2, 1))
    assert {tuple(np.flatnonzero(mask)) for mask in masks} == {(i, i + 1) for i in range(5)}


@pytest.mark.parametrize("sizes", [(6, 3, 2), (16, 2, 1), (40, 12, 5), (20, 4, 4), (614, 92, 31)])
def test_where_sentinels_stand_is_known_without_a_sample(sizes):
    sizes = Sizes(*sizes)
    rows = np.zeros((4000, sizes.context), dtype=np.uint8)
    targets = Spans(rows, Draws(2, "train"), sizes).batch(np.arange(4000)).targets_BT.numpy()
    seen = np.stack([(targets == SENTINEL + k).mean(axis=0) for k in range(sizes.spans)], axis=1)
    places = sentinel_places(sizes)
    assert places.sum(axis=0) == pytest.approx(np.ones(sizes.spans), abs=1e-9)
    assert np.abs(seen - places).max() < 5 * 0.5 / 4000**0.5
    assert (seen[places == 0] == 0).all()


@pytest.mark.parametrize(("noise", "span"), [(0.15, 3), (0.5, 3), (0.15, 10)])
def test_a_model_that_knows_positions_alone_has_no_gap(noise, span):
    config = RunConfig.model_validate(
        {
            "model": {"N": 1, "M": 1, "context": 64},
            "data": {"task": "span", "noise": noise, "span": span, "max_bytes": 500_000},
        }
    )
    task = load_task(config)
    trained = task.train.batch(np.arange(len(task.train))).targets_BT.numpy()
    judged = held_out_batches(task, 8, 1000)
    held_out = torch.cat([batch.targets_BT for batch in judged]).numpy()
    losses = []
    for column, asked in zip(trained.T, held_out.T, strict=True):
        seen = np.bincount(column, minlength=task.vocab) + 0.01
        losses.append(-np.log(seen / seen.sum())[asked])
    assert abs(unigram_of(task, judged) - np.mean(losses)) < 0.05


def test_the_vocabulary_and_the_facts_name_the_special_tokens(tmp_path):
    task = load_task(config_of("span", tmp_path, model={"context": 64}))
    assert task.vocab == SENTINEL + 3
    facts = task.facts()
    assert (facts["source_tokens_per_sample"], facts["targets_per_sample"], facts["spans_per_sample"]) == (57, 14, 3)
    assert str(SENTINEL) in facts["special"]
    # To ten hidden bytes, each sentinel once, and the end.
    frequencies = task.frequencies.sum(axis=0)
    assert frequencies[BEGIN] == 0
    assert frequencies[END:] == pytest.approx([frequencies[:256].sum() / 10] * 4)
    window = Batches(task.train, batch=4, seed=0).window(0)[0]
    assert window.n_targets == 4 * 14
