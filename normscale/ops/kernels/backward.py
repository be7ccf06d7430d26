"""The backward kernel: gradients of both inputs, and partial sums of those of the weights."""

import triton
import triton.language as tl

from normscale.ops.kernels.rows import (
    centred,
    keep_tile,
    load_factor,
    load_gain,
    load_gradient,
    load_sum,
    load_tile,
    row_extremes,
    store_partial,
    store_tile,
)


@triton.jit(do_not_specialize=["n_rows"])
def norm_backward(
    dy_ptr,
    dhandle_ptr,
    next_alpha_ptr,
    dz_ptr,
    x_ptr,
    residual_ptr,
    alpha_ptr,
    gamma_ptr,
    seed_ptr,
    moments_ptr,
    dx_ptr,
    dresidual_ptr,
    dgamma_ptr,
    dbias_ptr,
    dalpha_ptr,
    dz_partials_ptr,
    n_rows,
    dy_row_stride,
    dhandle_row_stride,
    dz_row_stride,
    x_row_stride,
    residual_row_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LAYERNORM: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ALPHA_VECTOR: tl.constexpr,
    NEXT_ALPHA_VECTOR: tl.constexpr,
    SCALE_RESIDUAL: tl.constexpr,
    DENSE: tl.constexpr,
    DROP_BELOW: tl.constexpr,
    KEEP_SCALE: tl.constexpr,
    REREAD: tl.constexpr,
):
    """With g = gain * dy and n the normalised z, all sums over a row:

    dz = rstd * (g - mean(g) - n * mean(g * n)) + what the stream brings; RMSNorm: without mean(g).
    dx = dz through dropout; dresidual = alpha * dz, or dz itself where the residual is a handle (SCALE_RESIDUAL off).
    dgamma = sum of dy * n, dbias = sum of dy, dalpha = sum of dz * residual, over the rows of this program; one
    partial row a program, summed afterwards in a fixed order.

    z is computed anew in fp32 from x and residual, since a rounded z is not what was normalised. REREAD reads the
    inputs a second time (from L2) and does not hold them across the reductions: for rows that registers cannot hold.
    """
    dy_stride = N if DENSE else dy_row_stride
    dhandle_stride = N if DENSE else dhandle_row_stride
    dz_stride = N if DENSE else dz_row_stride
    x_stride = N if DENSE else x_row_stride
    residual_stride = N if DENSE else residual_row_stride
    cols = tl.arange(0, BLOCK)
    program = tl.program_id(0)

    if dgamma_ptr is not None:
        dgamma = tl.zeros((ROWS, BLOCK), tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    if dalpha_ptr is not None:
        dalpha = tl.zeros((ROWS, BLOCK), tl.float32)
    if dz_partials_ptr is not None:
        squares = tl.zeros((ROWS,), tl.float32)
        largest = tl.zeros((ROWS,), tl.float32)
        nonfinite = tl.zeros((ROWS,), tl.int32)
        nan = tl.zeros((ROWS,), tl.int32)

    for tile in range(program, tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < n_rows)[:, None] & (cols < N)[None, :]
        if seed_ptr is not None:
            keep = keep_tile(seed_ptr, rows, 0, N, ROWS, BLOCK, DROP_BELOW)
        else:
            keep = None
        z, residual = load_sum(
            x_ptr, residual_ptr, alpha_ptr, keep, rows, cols, x_stride, residual_stride, mask,
            ALPHA_VECTOR, KEEP_SCALE, "",
        )  # fmt: skip
        dy = load_gradient(
            dy_ptr, dhandle_ptr, next_alpha_ptr, rows, cols, dy_stride, dhandle_stride, mask,
            NEXT_ALPHA_VECTOR, "",
        )  # fmt: skip
        normalised, rstd = centred(z, moments_ptr, rows, n_rows, LAYERNORM)
        g = dy
        if gamma_ptr is not None:
            g = dy * load_gain(gamma_ptr, cols, mask, ZERO_CENTRED)
        along = tl.sum(g * normalised, axis=1) * (1.0 / N)
        if LAYERNORM:
            mean = tl.sum(g, axis=1) * (1.0 / N)

        if REREAD:
            z, residual = load_sum(
                x_ptr, residual_ptr, alpha_ptr, keep, rows, cols, x_stride, residual_stride, mask,
                ALPHA_VECTOR, KEEP_SCALE, ".cg",
            )  # fmt: skip
            dy = load_gradient(
                dy_ptr, dhandle_ptr, next_alpha_ptr, rows, cols, dy_stride, dhandle_stride, mask,
                NEXT_ALPHA_VECTOR, ".cg",
            )  # fmt: skip
            normalised, rstd = centred(z, moments_ptr, rows, n_rows, LAYERNORM)
            g = dy
            if gamma_ptr is not None:
                g = dy * load_gain(gamma_ptr, cols, mask, ZERO_CENTRED)

        if dgamma_ptr is not None:
            dgamma += dy * normalised
        if dbias_ptr is not None:
            dbias += dy
        dz = g - normalised * along[:, None]
        if LAYERNORM:
            dz -= mean[:, None]
        dz *= rstd[:, None]
        if dz_ptr is not None:
            dz += load_tile(dz_ptr, rows, cols, dz_stride, mask, "")
        if dalpha_ptr is not None:
            dalpha += dz * residual
        if dz_partials_ptr is not None:
            inner = tl.where(mask, dz, 0.0)
            squares += tl.sum(inner * inner, axis=1)
            row_largest, counts = row_extremes(inner)
            largest = tl.maximum(largest, row_largest)
            nonfinite += counts & 65535
            nan += counts >> 16
        if dresidual_ptr is not None:
            if SCALE_RESIDUAL:
                store_tile(dresidual_ptr, rows, cols, N, mask, dz * load_factor(alpha_ptr, cols, mask, ALPHA_VECTOR))
            else:
                store_tile(dresidual_ptr, rows, cols, N, mask, dz)
        if dx_ptr is not None:
            if seed_ptr is not None:
                dz = tl.where(keep, dz * KEEP_SCALE, 0.0)
            store_tile(dx_ptr, rows, cols, N, mask, dz)

    partial = program.to(tl.int64) * N + cols
    if dgamma_ptr is not None:
        tl.store(dgamma_ptr + partial, tl.sum(dgamma, axis=0), mask=cols < N)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, axis=0), mask=cols < N)
    if dalpha_ptr is not None:
        tl.store(dalpha_ptr + partial, tl.sum(dalpha, axis=0), mask=cols < N)
    if dz_partials_ptr is not None:
        store_partial(dz_partials_ptr + program * 4, squares, largest, nonfinite, nan)
