"""The random numbers of samples: the published generator, one stream for each seed and split, fair choices."""

import numpy as np
import pytest

from normscale.data.draws import GOLDEN, Draws, chosen, mix, unit


def test_the_mixing_is_that_of_splitmix64():
    # The first outputs of the reference implementation (S. Vigna's splitmix64.c) from the state 1234567.
    states = np.arange(1, 6, dtype=np.uint64) * GOLDEN + np.uint64(1234567)
    assert mix(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_numbers_are_pinned():
    # A change of these numbers changes every run, so it is never an accident.
    raw = Draws(0, "train").raw(np.array([0, 7]), 2)
    assert raw.tolist() == [[429404410292939812, 7378380503522490360], [8856432454684286446, 3035609186658196185]]


def test_a_sample_has_its_numbers_whatever_else_is_drawn():
    draws = Draws(3, "train")
    together = draws.raw(np.array([5, 2**40, 0, 5]), 7)
    for row, sample in zip(together, (5, 2**40, 0, 5), strict=True):
        assert (draws.raw(np.array([sample]), 7)[0] == row).all()
    assert (draws.raw(np.array([1], dtype=np.int32), 7) == draws.raw(np.array([1]), 7)).all()


def test_seeds_splits_and_attempts_give_others_and_held_out_has_no_seed():
    samples = np.arange(4)
    streams = [Draws(seed, "train").raw(samples, 5, attempt) for seed in (0, 1, 2) for attempt in (0, 1, 2)]
    streams.append(Draws(0, "held_out").raw(samples, 5))
    assert len({number for raw in streams for number in raw.ravel().tolist()}) == len(streams) * 20
    assert (Draws(9, "held_out").raw(samples, 5) == streams[-1]).all()


def test_unit_is_uniform():
    numbers = unit(Draws(1, "train").raw(np.arange(1000), 100))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, 20, (0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < 50  # chi-square of 19 degrees of freedom: 1 in 10^4 is above 50
    assert unit(np.array([2**64 - 1], dtype=np.uint64))[0] < 1


def test_every_set_is_equally_likely():
    marks = chosen(Draws(2, "train").raw(np.arange(30_000), 5), 2)
    assert (marks.sum(axis=1) == 2).all()
    counts = np.bincount(marks @ 2 ** np.arange(5), minlength=32)
    assert (counts > 0).sum() == 10
    assert ((counts[counts > 0] - 3000) ** 2 / 3000).sum() < 34  # 9 degrees of freedom: 1 in 10^4


@pytest.mark.parametrize("k", [0, 5])
def test_none_and_all_can_be_chosen(k):
    assert chosen(Draws(2, "train").raw(np.arange(3), 5), k).sum() == 3 * k
