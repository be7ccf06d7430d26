"""Gradients of gain and bias by column tiles, for rows so wide that one program cannot hold their sums."""

import triton
import triton.language as tl

from normscale.ops.kernels.rows import centred, keep_tile, load_gradient, load_sum


@triton.jit(do_not_specialize=["n_rows"])
def weights_backward(
    dy_ptr,
    dhandle_ptr,
    next_alpha_ptr,
    x_ptr,
    residual_ptr,
    alpha_ptr,
    seed_ptr,
    moments_ptr,
    dgamma_ptr,
    dbias_ptr,
    n_rows,
    dy_row_stride,
    dhandle_row_stride,
    x_row_stride,
    residual_row_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LAYERNORM: tl.constexpr,
    ALPHA_VECTOR: tl.constexpr,
    NEXT_ALPHA_VECTOR: tl.constexpr,
    DENSE: tl.constexpr,
    DROP_BELOW: tl.constexpr,
    KEEP_SCALE: tl.constexpr,
):
    """dgamma = sum of dy * n, dbias = sum of dy, over the rows of this program and the columns of its tile.

    Programs (column tile, share of the rows); partial rows as in `norm_backward`. It reads dy, x and residual once
    more, where the kernel that has whole rows would have to spill.
    """
    dy_stride = N if DENSE else dy_row_stride
    dhandle_stride = N if DENSE else dhandle_row_stride
    x_stride = N if DENSE else x_row_stride
    residual_stride = N if DENSE else residual_row_stride
    first_col = tl.program_id(0) * BLOCK
    cols = first_col + tl.arange(0, BLOCK)
    share = tl.program_id(1)

    dgamma = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(share, tl.cdiv(n_rows, ROWS), tl.num_programs(1)):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < n_rows)[:, None] & (cols < N)[None, :]
        if seed_ptr is not None:
            keep = keep_tile(seed_ptr, rows, first_col, N, ROWS, BLOCK, DROP_BELOW)
        else:
            keep = None
        dy = load_gradient(
            dy_ptr, dhandle_ptr, next_alpha_ptr, rows, cols, dy_stride, dhandle_stride, mask,
            NEXT_ALPHA_VECTOR, "",
        )  # fmt: skip
        if dgamma_ptr is not None:
            z, _ = load_sum(
                x_ptr, residual_ptr, alpha_ptr, keep, rows, cols, x_stride, residual_stride, mask,
                ALPHA_VECTOR, KEEP_SCALE, "",
            )  # fmt: skip
            normalised, _ = centred(z, moments_ptr, rows, n_rows, LAYERNORM)
            dgamma += dy * normalised
        if dbias_ptr is not None:
            dbias += dy

    partial = share.to(tl.int64) * N + cols
    if dgamma_ptr is not None:
        tl.store(dgamma_ptr + partial, tl.sum(dgamma, axis=0), mask=cols < N)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, axis=0), mask=cols < N)
