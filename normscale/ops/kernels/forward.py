"""The forward kernel: one body for norm, add_norm and residual_norm."""

import triton
import triton.language as tl

from normscale.ops.kernels.rows import (
    inverse_root,
    keep_tile,
    load_columns,
    load_gain,
    load_sum,
    row_extremes,
    store_partial,
    store_tile,
)


@triton.jit(do_not_specialize=["n_rows"])
def norm_forward(
    x_ptr,
    residual_ptr,
    alpha_ptr,
    gamma_ptr,
    bias_ptr,
    seed_ptr,
    y_ptr,
    z_ptr,
    moments_ptr,
    z_partials_ptr,
    y_partials_ptr,
    n_rows,
    eps,
    x_row_stride,
    residual_row_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LAYERNORM: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ALPHA_VECTOR: tl.constexpr,
    DENSE: tl.constexpr,
    DROP_BELOW: tl.constexpr,
    KEEP_SCALE: tl.constexpr,
):
    """y = gamma * (z - mean(z)) / sqrt(var(z) + eps) + bias, z = alpha * residual + drop(x).

    RMSNorm: y = gamma * z / sqrt(mean(z^2) + eps) + bias. A pointer that is None is a term that is not there. With
    z_ptr the sum is written, and y is the norm of what was written.

    The variance is taken of the deviations, less the square of their mean, which is the rounding error of the mean:
    exact where the mean is 10^5 times the deviation. Both parts of the mean are saved. A row whose squares leave fp32
    (entries from about 10^18 on) is NaN, where rsqrt would make it 0.

    A program takes every n-th tile of ROWS rows; without statistics there are as many programs as tiles.
    """
    x_stride = N if DENSE else x_row_stride
    residual_stride = N if DENSE else residual_row_stride
    cols = tl.arange(0, BLOCK)
    program = tl.program_id(0)
    eps = tl.full((), eps, tl.float32)

    if z_partials_ptr is not None:
        z_squares = tl.zeros((ROWS,), tl.float32)
        z_largest = tl.zeros((ROWS,), tl.float32)
        z_nonfinite = tl.zeros((ROWS,), tl.int32)
        z_nan = tl.zeros((ROWS,), tl.int32)
    if y_partials_ptr is not None:
        y_squares = tl.zeros((ROWS,), tl.float32)
        y_largest = tl.zeros((ROWS,), tl.float32)
        y_nonfinite = tl.zeros((ROWS,), tl.int32)
        y_nan = tl.zeros((ROWS,), tl.int32)

    for tile in range(program, tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = rows < n_rows
        mask = inside[:, None] & (cols < N)[None, :]
        if seed_ptr is not None:
            keep = keep_tile(seed_ptr, rows, 0, N, ROWS, BLOCK, DROP_BELOW)
        else:
            keep = None
        z, _ = load_sum(
            x_ptr, residual_ptr, alpha_ptr, keep, rows, cols, x_stride, residual_stride, mask,
            ALPHA_VECTOR, KEEP_SCALE, "",
        )  # fmt: skip
        if z_ptr is not None:
            store_tile(z_ptr, rows, cols, N, mask, z)
            z = z.to(z_ptr.dtype.element_ty).to(tl.float32)

        if LAYERNORM:
            mean = tl.sum(z, axis=1) * (1.0 / N)
            deviation = z - mean[:, None]
            if N != BLOCK:
                deviation = tl.where(mask, deviation, 0.0)
            shift = tl.sum(deviation, axis=1) * (1.0 / N)
            mean_square = tl.sum(deviation * deviation, axis=1) * (1.0 / N)
            variance = mean_square - shift * shift
            rstd = inverse_root(variance, eps)
            normalised = (deviation - shift[:, None]) * rstd[:, None]
            tl.store(moments_ptr + rows, mean, mask=inside)
            tl.store(moments_ptr + n_rows + rows, shift, mask=inside)
            tl.store(moments_ptr + n_rows + n_rows + rows, rstd, mask=inside)
        else:
            mean_square = tl.sum(z * z, axis=1) * (1.0 / N)
            rstd = inverse_root(mean_square, eps)
            normalised = z * rstd[:, None]
            tl.store(moments_ptr + rows, rstd, mask=inside)

        y = normalised
        if gamma_ptr is not None:
            y *= load_gain(gamma_ptr, cols, mask, ZERO_CENTRED)
        if bias_ptr is not None:
            y += load_columns(bias_ptr, cols, mask)
        store_tile(y_ptr, rows, cols, N, mask, y)

        if z_partials_ptr is not None:
            largest, counts = row_extremes(z)
            if LAYERNORM:
                centre = mean + shift
                squares = (variance + centre * centre) * N  # saves a reduction, but makes NaN of Inf - Inf
                z_squares += tl.where((squares != squares) & (counts < 65536), float("inf"), squares)
            else:
                z_squares += mean_square * N
            z_largest = tl.maximum(z_largest, largest)
            z_nonfinite += counts & 65535
            z_nan += counts >> 16
        if y_partials_ptr is not None:
            stored = tl.where(mask, y.to(y_ptr.dtype.element_ty).to(tl.float32), 0.0)
            y_squares += tl.sum(stored * stored, axis=1)
            largest, counts = row_extremes(stored)
            y_largest = tl.maximum(y_largest, largest)
            y_nonfinite += counts & 65535
            y_nan += counts >> 16

    if z_partials_ptr is not None:
        store_partial(z_partials_ptr + program * 4, z_squares, z_largest, z_nonfinite, z_nan)
    if y_partials_ptr is not None:
        store_partial(y_partials_ptr + program * 4, y_squares, y_largest, y_nonfinite, y_nan)
