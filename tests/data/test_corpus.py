"""Corpora as arrays and as data sets: the same bytes, and the numbers that are recorded about them."""

import math
from hashlib import sha256

import datasets
import numpy as np
import pytest

from normscale.config.schema import DataConfig
from normscale.data.corpus import build, packed, require, unigram_nats
from normscale.data.rows import Row, Source
from normscale.errors import DataError


def make(train: bytes, held_out: bytes, max_bytes: int | None = None):
    rows = [Row("t", train, False), Row("h", held_out, True)]
    return build(DataConfig(source="made", max_bytes=max_bytes), Source(rows, "by hand"))


def test_arrays_are_views_of_the_tables():
    rows = [Row(f"r{i}", bytes([65 + i]) * (i + 1), i % 3 == 0) for i in range(9)]
    corpus = build(DataConfig(), Source(rows, "by hand"))
    for split, data in (("train", corpus.train), ("held_out", corpus.held_out)):
        table = corpus.tables[split]
        assert isinstance(table, datasets.Dataset)
        assert b"".join(table["text"]) == data.tobytes()
        assert not data.flags.writeable
    assert list(corpus.tables["held_out"]["place"]) == ["r0", "r3", "r6"]


def test_limits_cut_within_a_row():
    corpus = make(b"a" * 100, b"b" * 100, max_bytes=50)
    assert (corpus.train.size, corpus.held_out.size) == (50, 5)
    help_text = DataConfig.model_fields["max_bytes"].description
    assert "of training text; held out: that share more" in str(help_text)


def test_reading_stops_when_both_splits_are_full():
    def endless():
        while True:
            yield Row("t", b"a" * 10, False)
            yield Row("h", b"b" * 10, True)

    corpus = build(DataConfig(max_bytes=95), Source(endless(), "by hand"))
    assert (corpus.train.size, corpus.held_out.size) == (95, 9)


def test_digest_covers_both_splits_and_their_boundary():
    assert make(b"ab", b"c").digest == sha256((2).to_bytes(8, "little") + b"abc").hexdigest()
    assert len({make(*x).digest for x in [(b"ab", b"c"), (b"a", b"bc"), (b"ab", b"d"), (b"bb", b"c")]}) == 4


def test_unigram_is_the_smoothed_cross_entropy():
    # Training: a three times, b once, so p(a) = 4/260, p(b) = 2/260, any other byte 1/260.
    corpus = make(b"aaab", b"abz")
    assert corpus.unigram_nats == pytest.approx(-math.log(4 / 260 * 2 / 260 * 1 / 260) / 3, rel=1e-12)
    even = np.arange(256, dtype=np.uint8)
    assert unigram_nats(even, even) == pytest.approx(math.log(256))


def test_facts_are_what_a_record_needs():
    facts = make(b"aaab", b"abz").facts()
    assert {"name", "digest", "train_tokens", "held_out_tokens", "unigram_nats", "split"} <= facts.keys()
    assert (facts["train_tokens"], facts["held_out_tokens"]) == (4, 3)


def test_packed_rows_overlap_by_one_byte():
    corpus = make(bytes(range(201)), b"x" * 20)
    table = packed(corpus, "train", 7)
    assert isinstance(table, datasets.Dataset)
    assert len(table) == 28  # 200 targets / 7
    for i in (0, 1, 27):
        assert table[i]["bytes"].tolist() == list(range(7 * i, 7 * i + 8))
    targets = [byte for row in table for byte in row["bytes"][1:].tolist()]
    assert targets == list(range(1, 197))


@pytest.mark.parametrize(("size", "rows"), [(8, 1), (14, 1), (15, 2)])
def test_packed_needs_one_byte_more_than_the_context(size, rows):
    assert len(packed(make(b"a" * size, b"b"), "train", 7)) == rows


def test_too_short_says_how_much_is_there_and_needed():
    corpus = make(b"a" * 1000, b"b" * 99)
    with pytest.raises(DataError, match=r"one batch of 1 x 99 needs 100 bytes .* training has 1000 and held-out 99"):
        packed(corpus, "held_out", 99)
    require(corpus, context=14, batch=7)  # 99 bytes: exactly enough
    with pytest.raises(DataError, match="'made' is too short: one batch of 7 x 15 needs 106 bytes"):
        require(corpus, context=15, batch=7)
    with pytest.raises(DataError, match="training has 50 and held-out 99"):
        require(make(b"a" * 50, b"b" * 99), context=14, batch=7)


def test_empty_split_is_refused():
    with pytest.raises(DataError, match=r"'made' holds too little text .*training 3 bytes, held-out 0"):
        make(b"abc", b"")
