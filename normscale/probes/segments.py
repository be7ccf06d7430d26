"""Sums of squares over the parameters of every sublayer, in a few operations whatever the depth."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from normscale.probes.lengths import lengths
from normscale.probes.probe import Parameters

LINE = 16  # entries that are taken together where not all are: a cache line of fp32 numbers
LEAST = 896  # entries of a stretch that are taken at least, or all it has


class Run(NamedTuple):
    """Stretches of one length at one distance from each other in a flat tensor, and the site that each belongs to.

    Of each, `lines` groups of `width` entries are taken, `step` entries from each other.
    """

    start: int
    length: int
    stride: int
    sites: Tensor
    lines: int
    width: int
    step: int
    weight: float


class SiteSquares:
    """Sums of squares by site of a tensor laid out as the parameters are.

    A site's parameters stand side by side, matrices in one place and vectors in another, with no more than padding
    between them; blocks of one structure follow one another at one distance. Sublayers are then the rows of a few
    strided matrices, where a norm over each parameter would be 16 000 small operations at 1000 blocks.

    With `most` about so many entries are looked at in all, the same number of each site's matrices, evenly spread over
    them: the sums are then estimates. Of a deep model it is more, as no stretch has fewer than `LEAST`.
    """

    def __init__(self, parameters: Parameters, most: int | None = None) -> None:
        stretches = [
            (site, spans[0][0], spans[-1][1] - spans[0][0])
            for site, both in enumerate(parameters.sites)
            for spans in both
            if spans
        ]
        self.sites = len(parameters.sites)
        share = None if most is None else max(LEAST, most // len(stretches))
        self.runs = []
        for start, length, stride, sites in _runs(stretches):
            lines, width, step = sample_of(length, share)
            index = torch.tensor(sites, device=parameters.device)
            self.runs.append(Run(start, length, stride, index, lines, width, step, length / (lines * width)))

    def __call__(self, flat: Tensor) -> Tensor:
        """Returns the sums.

        Shape: flat [total]; result [sites] fp64.
        """
        return self.sums(self.parts(flat))

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Returns what is looked at, as views: of each run, the entries of its stretches.

        Shape: flat [total]; results [stretches, lines, width].
        """
        return [
            flat.as_strided((len(run.sites), run.lines, run.width), (run.stride, run.step, 1), run.start)
            for run in self.runs
        ]

    def sums(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the sums of squares by site of such parts.

        Shape: result [sites] fp64.
        """
        sums = torch.zeros(self.sites, dtype=torch.float64, device=parts[0].device)
        for run, part in zip(self.runs, parts, strict=True):
            sums.index_add_(0, run.sites, lengths(part.flatten(1)).square() * run.weight)
        return sums


def sample_of(length: int, share: int | None) -> tuple[int, int, int]:
    """Returns lines, width and step of what is taken of so many entries; an odd number of lines apart: all columns."""
    if share is None or length <= share:
        return 1, length, length
    apart = -(-length // share) | 1
    return max(1, length // LINE // apart), LINE, apart * LINE


def _runs(stretches: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int, list[int]]]:
    """Yields start, length, stride and sites of runs of (site, start, length) at equal distances."""
    for length in dict.fromkeys(length for _, _, length in stretches):
        same = sorted((start, site) for site, start, other in stretches if other == length)
        gaps = [b[0] - a[0] for a, b in pairwise(same)]
        first = 0
        while first < len(same):
            last = first + 1
            while last < len(same) and gaps[last - 1] == gaps[first]:
                last += 1
            stride = gaps[first] if last - first > 1 else length
            yield same[first][0], length, stride, [site for _, site in same[first:last]]
            first = last
