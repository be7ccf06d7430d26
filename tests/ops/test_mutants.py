"""The kernels' tests fail where a kernel is wrong.

Broken once each, in a temporary copy (`mutants.py` has the replacements): padding counted into the variance; alpha on
the branch; eps left out, and outside the root; squares that overflow; the last tile of rows left out, forward and
backward; the mean's rounding error left in, forward and backward; the mean of g missing in LayerNorm's gradient; a row
stride ignored; the 1 of a zero-centred gain forgotten; the gain's gradient of the last tile only, and without n in the
kernel for wide rows; alpha's gradient without the residual; the stream's gradient lost; a handle's gradient not
multiplied; dropout forgotten in the backward pass; a NaN that does not show in the statistics; 32-bit row numbers.
"""

import pytest

from tests.ops.interpreter.test_interpreter import why_not
from tests.ops.mutants import MUTANTS, OPS, ROOT, USUAL, survives


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_follows_the_source(name: str) -> None:
    mutant = MUTANTS[name]
    source = (ROOT / OPS / mutant.file).read_text()
    assert mutant.applied(source) != source


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", USUAL)
def test_a_broken_kernel_is_noticed(name: str) -> None:
    if reason := why_not():
        pytest.skip(reason)
    assert not survives(MUTANTS[name])
