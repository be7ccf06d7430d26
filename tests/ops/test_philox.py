"""The counter-based generator against published numbers, and what dropout makes of it."""

import pytest
import torch

from normscale.ops.philox import drop, keep_mask, keep_scale, random_words, threshold


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        # Random123's known answers for philox4x32-10, as far as a counter of 64 bits reaches.
        (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ],
)
def test_known_answers(key: int, counter: int, words: tuple[int, ...]) -> None:
    assert tuple(random_words(torch.tensor(key), torch.tensor(counter)).tolist()) == words


def philox_in_python(seed: int, counter: int) -> list[int]:
    """The ten rounds in Python's integers."""
    word = 0xFFFFFFFF
    c, k = [counter & word, (counter >> 32) & word, 0, 0], [seed & word, (seed >> 32) & word]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & word, (a >> 32) ^ c[3] ^ k[1], a & word]
        k = [(k[0] + 0x9E3779B9) & word, (k[1] + 0xBB67AE85) & word]
    return c


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32 + 5, -(2**62)])
@pytest.mark.parametrize("counter", [0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 3])
def test_every_word_equals_exact_integers(seed: int, counter: int) -> None:
    got = random_words(torch.tensor(seed), torch.tensor([counter]))
    assert got.tolist() == [philox_in_python(seed % 2**64, counter)]


def test_neighbours_take_the_words_of_one_counter_and_rows_begin_anew() -> None:
    seed = torch.tensor(5)
    mask = keep_mask(seed, torch.Size((2, 3, 6)), 0.4).view(6, 6)
    for row in range(6):
        words = [w for group in range(2) for w in philox_in_python(5, 2 * row + group)][:6]
        assert mask[row].tolist() == [w >= threshold(0.4) for w in words]


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_the_share_kept_and_the_expectation(dropout: float) -> None:
    x = torch.ones(500, 401)
    dropped = drop(x, dropout, torch.tensor(11))
    share = float((dropped != 0).double().mean())
    assert abs(share - (1 - dropout)) < 4 * (dropout * (1 - dropout) / x.numel()) ** 0.5
    assert set(dropped.unique().tolist()) == {0.0, float(torch.tensor(keep_scale(dropout)))}


def test_no_dropout_is_the_tensor_itself_and_all_of_it_is_zero() -> None:
    x = torch.randn(4, 7)
    assert drop(x, 0.0, None) is x
    assert not drop(x, 1.0, torch.tensor(3)).any()
