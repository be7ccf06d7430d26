"""Subwords: no text is lost, the same text makes the same ones, and merges are those that pay."""

import pytest

from normscale.data.parallel import Pair
from normscale.data.subwords import learn, text_of
from normscale.errors import DataError

PAIRS = [("a small house", "ein kleines Haus"), ("a house", "ein Haus"), ("houses\tand  Häuser ✓", "Häuser")] * 3


def test_joining_the_tokens_of_any_line_gives_it_back() -> None:
    subwords = learn(PAIRS, 300)
    lines = ["a small house", "", " two  spaces ", "tab\tand é ✓ 漢", "a\rb\u2028c", "\x00"]
    assert [subwords.decode(tokens.tolist()) for tokens in subwords.encode(lines)] == lines


def test_what_is_frequent_is_one_token_and_never_more_than_asked_for() -> None:
    few, many = learn(PAIRS, 260), learn(PAIRS, 10_000)
    assert few.size == 260
    assert 260 < many.size < 400  # the text has no more merges that were seen twice
    (short,), (long,) = many.encode(["ein Haus"]), few.encode(["ein Haus"])
    assert len(short) == 2 < len(long)
    assert max(short) < many.size


def test_both_languages_share_the_tokens_and_the_same_text_makes_the_same() -> None:
    assert learn(PAIRS, 280).digest() == learn(list(PAIRS), 280).digest()
    assert learn(PAIRS, 280).digest() != learn(PAIRS, 281).digest()
    (tokens,) = learn([("aaaa", "bbbb")] * 4, 262).encode(["aaaabbbb"])
    assert len(tokens) == 2  # merges of either side


def test_a_line_that_is_no_text_is_named() -> None:
    with pytest.raises(DataError, match=r"^data\.source: line 7 of de is not UTF-8 .*data\.subwords=null"):
        text_of(Pair(7, b"fine", b"not \xff"), "data.source", ("en", "de"))
