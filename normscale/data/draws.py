"""Random numbers of numbered samples, as a pure function of (seed, split, sample).

SplitMix64 is computed here from its formula: integers alone, so every version and machine gives the same numbers, and
those of a whole batch come from a few operations on arrays. NumPy promises as much for the raw numbers of its
generators, but would need one generator for each sample.

Reference: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195, with the constants of S. Vigna's splitmix64.c.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscale.data.corpus import Split

HELD_OUT_SEED = 0  # not the run's: every run is judged on the same samples
SPLITS: tuple[Split, ...] = ("train", "held_out")
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
Raw = NDArray[np.uint64]


class Draws:
    """The random numbers of one split."""

    def __init__(self, seed: int, split: Split) -> None:
        words = [HELD_OUT_SEED if split == "held_out" else seed, SPLITS.index(split)]
        self.key: Raw = np.random.SeedSequence(words).generate_state(1, np.uint64).astype(np.uint64)

    def raw(self, samples: NDArray[Any], n: int, attempt: int = 0) -> Raw:
        """Returns n numbers of 64 random bits for each sample; another attempt gives others.

        Shape:
            samples: [B] int64; result [B, n].
        """
        key = self.key ^ mix(np.array([attempt], dtype=np.uint64))  # mix(0) is 0
        counters = samples.astype(np.uint64)[:, None] * np.uint64(n) + np.arange(1, n + 1, dtype=np.uint64)
        return mix(counters * GOLDEN + key)


def mix(x: Raw) -> Raw:
    """Returns the bits of every element mixed, one to one."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def unit(raw: Raw) -> NDArray[np.float64]:
    """Returns numbers in [0, 1), evenly spread."""
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def chosen(raw: Raw, k: int) -> NDArray[np.bool_]:
    """Returns, for each row of raw numbers, k of its places marked, every set of k equally likely.

    Shape:
        raw: [B, n]; result [B, n].
    """
    marks = np.zeros(raw.shape, dtype=bool)
    np.put_along_axis(marks, np.argsort(raw, axis=1, kind="stable")[:, :k], True, axis=1)
    return marks
