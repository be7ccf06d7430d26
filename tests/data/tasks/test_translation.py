"""Translation: pairs as they stand in the files, padded, split, and left out where they do not fit."""

import gzip
from hashlib import sha256

import numpy as np
import pytest

from normscale.config.schema import RunConfig
from normscale.data.batches import held_out_batches, unigram_of
from normscale.data.rows import held_by_position
from normscale.data.task import IGNORE, load_task
from normscale.data.tasks.translation import BEGIN, END, PAD
from normscale.errors import DataError
from tests.data.made import write_pairs


def config(folder, context: int = 8, batch: int = 1, **data) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"N": 1, "M": 1, "d": 16, "heads": 2, "context": context},
            "data": {"task": "translation", "source": str(folder / "x"), "languages": ["en", "de"], **data},
            "train": {"batch": batch},
        }
    )


def write(folder, source: list[bytes], target: list[bytes], name: str = "x") -> None:
    for ending, lines in (("en", source), ("de", target)):
        (folder / f"{name}.{ending}").write_bytes(b"".join(line + b"\n" for line in lines))


def held_apart(n: int) -> list[bool]:
    """Returns which of n pairs are held out where a tenth is."""
    return [held_by_position(index, 0.1) for index in range(n)]


def pairs_of(samples) -> list[tuple[bytes, bytes]]:
    batch = samples.batch(np.arange(len(samples)))
    source = [bytes(x for x in row if x < 256) for row in batch.source_BS.tolist()]
    target = [bytes(x for x in row if 0 <= x < 256) for row in batch.targets_BT.tolist()]
    return list(zip(source, target, strict=True))


def test_a_pair_as_the_model_gets_it(tmp_path):
    write(tmp_path, [b"ab", b"cde"], [b"xyz", b"\xff"])
    task = load_task(config(tmp_path, held_out=0.5))
    assert task.vocab == 259
    batch = task.train.batch(np.array([0]))
    if batch.n_targets == 2:  # which of the two is held out is not the point here
        batch = task.held_out.batch(np.array([0]))
    assert batch.source_BS.tolist() == [[97, 98, END, PAD, PAD, PAD, PAD, PAD]]
    assert batch.source_keep_BS.tolist() == [[True] * 3 + [False] * 5]
    assert batch.tokens_BT.tolist() == [[BEGIN, 120, 121, 122, PAD, PAD, PAD, PAD]]
    assert batch.targets_BT.tolist() == [[120, 121, 122, END, IGNORE, IGNORE, IGNORE, IGNORE]]
    assert batch.n_targets == 4


def test_pairs_that_fill_the_context_fit_and_longer_ones_are_left_out(tmp_path):
    lines = [b"1234567", b"12345678", b"1", b"1", b"", b"1", b" \t\r", b"123"]
    other = [b"abcdefg", b"a", b"abcdefgh", b"", b"", b"b", b"c", b"abc"]
    write(tmp_path, lines, other)
    task = load_task(config(tmp_path, held_out=0.4))
    assert sorted(pairs_of(task.train) + pairs_of(task.held_out)) == [
        (b"1", b"b"),
        (b"123", b"abc"),
        (b"1234567", b"abcdefg"),
    ]
    facts = task.facts()
    assert (facts["dropped_long"], facts["dropped_blank"]) == (2, 3)
    full = next(
        samples.batch(np.array([i]))
        for samples in (task.train, task.held_out)
        for i in range(len(samples))
        if samples.batch(np.array([i])).n_targets == 8
    )
    assert full.source_keep_BS.all()
    assert full.tokens_BT[0].tolist() == [BEGIN, *b"abcdefg"]


def test_lines_are_bytes(tmp_path):
    odd = [b"a\r", b"\xff\xfe\x00", b"\x85\x0b\x0c", "é\u2028".encode(), b"tab\t"]
    write(tmp_path, odd, odd)
    task = load_task(config(tmp_path, held_out=0.25))
    assert {pair for split in (task.train, task.held_out) for pair in pairs_of(split)} == {(x, x) for x in odd}


def test_a_share_of_the_pairs_is_held_out_whatever_the_context(tmp_path):
    write_pairs(tmp_path / "x", 400)
    splits = {}
    for context in (9, 16):
        task = load_task(config(tmp_path, context))
        splits[context] = [{source[:3] for source, _ in pairs_of(s)} for s in (task.train, task.held_out)]
        assert not splits[context][0] & splits[context][1]
        assert pairs_of(task.train) == [(a, b) for a, b in pairs_of(task.train) if a[:3] == b[:3]]
    assert [len(x) for x in splits[16]] == [360, 40]
    assert splits[9][0] < splits[16][0]
    assert splits[9][1] < splits[16][1]


def test_files_of_their_own_can_be_held_out(tmp_path):
    write(tmp_path, [b"a", b"b"], [b"1", b"2"])
    write(tmp_path, [b"c"], [b"3"], name="valid")
    task = load_task(config(tmp_path, held_out_source=str(tmp_path / "valid")))
    assert pairs_of(task.train) == [(b"a", b"1"), (b"b", b"2")]
    assert pairs_of(task.held_out) == [(b"c", b"3")]
    assert task.facts()["split"] == "by file"


def test_packed_files_and_a_last_line_without_its_end_are_the_same(tmp_path):
    write_pairs(tmp_path / "x", 40)
    digest = load_task(config(tmp_path, 16)).digest
    for ending in ("en", "de"):
        file = tmp_path / f"x.{ending}"
        (tmp_path / f"y.{ending}.gz").write_bytes(gzip.compress(file.read_bytes().removesuffix(b"\n")))
    other = load_task(config(tmp_path, 16, source=str(tmp_path / "y")))
    assert other.digest == digest
    assert load_task(config(tmp_path, 16, languages=["de", "en"])).digest != digest


def test_no_more_is_read_than_max_bytes(tmp_path):
    write_pairs(tmp_path / "x", 400)
    whole = load_task(config(tmp_path, 16, max_bytes=None))
    part = load_task(config(tmp_path, 16, max_bytes=1000))
    pairs = pairs_of(part.train)
    size = sum(len(a) + len(b) for a, b in pairs)
    assert 1000 - 2 * 15 < size <= 1000
    assert pairs == pairs_of(whole.train)[: len(pairs)]
    assert sum(len(a) + len(b) for a, b in pairs_of(part.held_out)) <= 100
    assert part.digest != whole.digest


def test_the_unigram_entropy_counts_ends_and_no_padding(tmp_path):
    held = held_apart(1000)
    write(tmp_path, [b"h" if x else b"s" for x in held], [b"ab"] * 1000)
    task = load_task(config(tmp_path, batch=2))
    assert task.frequencies[[97, 98, END]].tolist() == [900] * 3
    assert task.frequencies.sum() == 2700
    p = 901 / (2700 + 259)
    assert unigram_of(task, held_out_batches(task, 2, 5)) == pytest.approx(-np.log(p))


def test_too_few_pairs_says_why(tmp_path):
    held = held_apart(20)
    write(tmp_path, [b"h" if x else b"a" for x in held] + [b"12345678", b""], [b"b"] * 22)
    with pytest.raises(DataError) as e:
        load_task(config(tmp_path, batch=3))
    said = str(e.value)
    assert "one batch needs 3 pairs in each split, training has 18 and held-out 2" in said
    assert (
        "(1 were longer than model.context=8 or data.max_bytes holds, 1 blank and 0 held out but in training too)"
        in said
    )


def test_no_pair_is_in_both_splits(tmp_path):
    lines = [bytes([97 + i % 7]) for i in range(200)] + [b"only%d" % (i % 10) for i in range(10)]
    write(tmp_path, lines, lines)
    task = load_task(config(tmp_path))
    train, held_out = pairs_of(task.train), pairs_of(task.held_out)
    assert held_out
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) + task.facts()["dropped_repeated"] == len(lines)
    write(tmp_path, [b"c", b"a"], [b"3", b"1"], name="valid")
    write(tmp_path, [b"a", b"a"], [b"1", b"2"])
    task = load_task(config(tmp_path, held_out_source=str(tmp_path / "valid")))
    assert pairs_of(task.held_out) == [(b"c", b"3")]
    assert task.facts()["dropped_repeated"] == 1


def test_held_out_files_are_not_those_of_training(tmp_path):
    write(tmp_path, [b"a", b"b"], [b"1", b"2"])
    for ending in ("en", "de"):
        (tmp_path / f"link.{ending}").symlink_to(tmp_path / f"x.{ending}")
    for name in ("x", "link"):
        with pytest.raises(DataError, match=r"^data\.held_out_source: .* is the file of data\.source"):
            load_task(config(tmp_path, held_out_source=str(tmp_path / name)))


def test_the_source_that_is_too_short_is_named(tmp_path):
    write(tmp_path, [b"a", b"b"], [b"1", b"2"])
    write(tmp_path, [b"c"], [b"3"], name="valid")
    valid = str(tmp_path / "valid")
    with pytest.raises(DataError, match=rf"^data\.held_out_source: '{valid}' is too short") as e:
        load_task(config(tmp_path, batch=2, held_out_source=valid))
    assert "data.held_out," not in str(e.value)  # which is not read
    assert e.value.key == "data.held_out_source"
    with pytest.raises(DataError, match=rf"^data\.source: '{tmp_path}/x' is too short"):
        load_task(config(tmp_path, batch=3, held_out_source=valid))


def test_files_that_do_not_fit_each_other_are_refused_though_the_first_lines_were_enough(tmp_path):
    write(tmp_path, [b"a"] * 2000, [b"b"] * 2001)
    with pytest.raises(DataError) as e:
        load_task(config(tmp_path, max_bytes=100))
    assert f"{tmp_path}/x.en has 2000 lines and {tmp_path}/x.de has 2001" in str(e.value)


def say(samples, i: int) -> tuple[str, str]:
    return samples.text(samples.source[i].tolist()), samples.text(samples.target[i].tolist())


def test_in_subwords_a_pair_is_shorter_and_says_the_same(tmp_path):
    lines = [f"the house number {i} is small".encode() for i in range(40)]
    other = [f"das Haus Nummer {i} ist klein".encode() for i in range(40)]
    write(tmp_path, lines, other)
    task = load_task(config(tmp_path, context=24, subwords=400))
    assert task.facts()["subwords"] == task.vocab - 3
    assert 256 < task.vocab - 3 <= 400
    pairs = task.held_out
    assert [say(pairs, i) for i in range(len(pairs))] == [
        (a.decode(), b.decode()) for a, b, held in zip(lines, other, held_apart(40), strict=True) if held
    ]
    batch = pairs.batch(np.array([0]))
    begin, end, pad = task.vocab - 3, task.vocab - 2, task.vocab - 1
    length = batch.n_targets
    assert length < len(other[0])
    assert batch.tokens_BT[0, 0] == begin
    assert batch.tokens_BT[0, 1:length].tolist() == batch.targets_BT[0, : length - 1].tolist()
    assert (batch.targets_BT[0, length - 1], batch.tokens_BT[0, length:].unique().tolist()) == (end, [pad])
    assert batch.source_BS[0][batch.source_keep_BS[0]][-1] == end
    assert task.frequencies.sum() == sum(len(task.train.target[i]) + 1 for i in range(len(task.train)))


def test_in_subwords_lines_are_as_long_as_their_tokens(tmp_path):
    lines = [b"the same words"] * 30 + [sha256(bytes([i])).hexdigest()[:20].encode() for i in range(10)]
    write(tmp_path, [x + b"%d" % i for i, x in enumerate(lines)], lines)
    facts = load_task(config(tmp_path, context=8, subwords=300)).facts()
    assert facts["dropped_long"] == 10  # and not the thirty, of more bytes
    assert load_task(config(tmp_path, context=24, subwords=300)).facts()["dropped_long"] == 0


def test_a_line_that_is_longer_than_all_that_is_read_does_not_end_a_split(tmp_path):
    write_pairs(tmp_path / "x", 400)
    for ending in ("en", "de"):
        path = tmp_path / f"x.{ending}"
        path.write_bytes(b"long " * 400 + b"\n" + path.read_bytes())
    found = load_task(config(tmp_path, 16, subwords=300, max_bytes=3000))
    assert found.told["dropped_long"] == 1
    assert len(found.train) > 50


def test_in_subwords_the_digest_is_of_the_vocabulary_too(tmp_path):
    write_pairs(tmp_path / "x", 60)
    digests = {load_task(config(tmp_path, 16, subwords=size)).digest for size in (None, 300, 301)}
    assert len(digests) == 3


def test_in_subwords_a_line_that_is_no_text_is_named_with_its_source(tmp_path):
    write(tmp_path, [b"a", b"b"], [b"1", b"2"])
    write(tmp_path, [b"c", b"\xff"], [b"3", b"4"], name="valid")
    with pytest.raises(DataError, match=r"^data\.held_out_source: line 2 of en is not UTF-8"):
        load_task(config(tmp_path, subwords=300, held_out_source=str(tmp_path / "valid")))


def test_bytes_that_are_no_text_are_shown_as_such(tmp_path):
    write(tmp_path, [b"ab", b"cd"], [b"x\xff", b"y"])
    task = load_task(config(tmp_path, held_out=0.5))
    assert {say(samples, 0) for samples in (task.train, task.held_out)} == {("ab", "x\ufffd"), ("cd", "y")}
