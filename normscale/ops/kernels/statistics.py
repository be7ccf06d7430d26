"""The kernel that makes one probe row of the partial statistics of many programs."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_programs"])
def reduce_partials(partials_ptr, rows_ptr, index_ptr, n_programs, BLOCK: tl.constexpr):
    """rows[index] = [sum of squares, largest absolute value, non-finite entries]; a NaN makes the first two NaN.

    Shape: partials [n_programs, 4]; rows [R, 3] fp32; index [1] int64. One program.
    """
    squares = tl.zeros((BLOCK,), tl.float32)
    largest = tl.zeros((BLOCK,), tl.float32)
    nonfinite = tl.zeros((BLOCK,), tl.float32)
    nan = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n_programs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < n_programs
        squares += tl.load(partials_ptr + at * 4, mask=mask, other=0.0)
        largest = tl.maximum(largest, tl.load(partials_ptr + at * 4 + 1, mask=mask, other=0.0))
        nonfinite += tl.load(partials_ptr + at * 4 + 2, mask=mask, other=0.0)
        nan += tl.load(partials_ptr + at * 4 + 3, mask=mask, other=0.0)
    poison = tl.where(tl.sum(nan, axis=0) > 0, float("nan"), 0.0)
    row_ptr = rows_ptr + tl.load(index_ptr) * 3
    tl.store(row_ptr, tl.sum(squares, axis=0) + poison)
    tl.store(row_ptr + 1, tl.max(largest, axis=0) + poison)
    tl.store(row_ptr + 2, tl.sum(nonfinite, axis=0))
