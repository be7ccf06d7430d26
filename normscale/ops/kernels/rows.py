"""What the kernels share: tiles of ROWS x BLOCK fp32 numbers, the sum z, dropout, and a tile's statistics.

Every load is cast to fp32 at once and every result cast at its store, so that no arithmetic is in half precision. Row
numbers are int64 before they meet a stride: M * D may pass 2^31. Lanes outside the matrix hold 0.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(ptr, rows, cols, row_stride, mask, CACHE: tl.constexpr):
    """Returns ROWS x BLOCK numbers in fp32. CACHE: ".cg" for a second read, which is served by L2; "" else.

    That the two reads differ also keeps the compiler from making one of them.
    """
    pointers = ptr + rows[:, None] * row_stride + cols[None, :]
    return tl.load(pointers, mask=mask, other=0.0, cache_modifier=CACHE).to(tl.float32)


@triton.jit
def store_tile(ptr, rows, cols, row_stride, mask, tile):
    """Writes a tile in the dtype of what `ptr` points at."""
    tl.store(ptr + rows[:, None] * row_stride + cols[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_columns(ptr, cols, mask):
    """Returns one number a column in fp32, the same in every row of a tile.

    Loaded in the tile's shape, from the cache, so that it has the tile's layout: a row of fp32 beside tiles of bf16
    would be moved between threads through shared memory.
    """
    pointers = tl.broadcast_to((ptr + cols)[None, :], mask.shape)
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_gain(gamma_ptr, cols, mask, ZERO_CENTRED: tl.constexpr):
    """Returns gamma, or 1 + gamma; the 1 is added in fp32."""
    gain = load_columns(gamma_ptr, cols, mask)
    if ZERO_CENTRED:
        gain += 1.0
    return gain


@triton.jit
def load_factor(ptr, cols, mask, VECTOR: tl.constexpr):
    """Returns a multiplier, read by pointer: one number, or one a column."""
    if VECTOR:
        factor = load_columns(ptr, cols, mask)
    else:
        factor = tl.load(ptr).to(tl.float32)
    return factor


@triton.jit
def keep_tile(
    seed_ptr, rows, first_col, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DROP_BELOW: tl.constexpr
):
    """Returns True where dropout keeps an element; the same elements as `ops.philox.keep_mask`."""
    groups = first_col // 4 + tl.arange(0, BLOCK // 4)
    counter = rows[:, None] * ((N + 3) // 4) + groups[None, :]
    a, b, c, d = tl.randint4x(tl.load(seed_ptr), counter)
    words = tl.join(tl.join(a, c), tl.join(b, d))  # the last two dimensions hold a b c d in this order
    return tl.reshape(words, (ROWS, BLOCK)) >= DROP_BELOW


@triton.jit
def load_sum(
    x_ptr,
    residual_ptr,
    alpha_ptr,
    keep,
    rows,
    cols,
    x_row_stride,
    residual_row_stride,
    mask,
    ALPHA_VECTOR: tl.constexpr,
    KEEP_SCALE: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Returns z = alpha * residual + drop(x) and the residual; z = x where there is no residual."""
    z = load_tile(x_ptr, rows, cols, x_row_stride, mask, CACHE)
    if keep is not None:
        z = tl.where(keep, z * KEEP_SCALE, 0.0)
    if residual_ptr is not None:
        residual = load_tile(residual_ptr, rows, cols, residual_row_stride, mask, CACHE)
        if alpha_ptr is not None:
            z = load_factor(alpha_ptr, cols, mask, ALPHA_VECTOR) * residual + z
        else:
            z = residual + z
    else:
        residual = z
    return z, residual


@triton.jit
def load_gradient(
    dy_ptr,
    dhandle_ptr,
    next_alpha_ptr,
    rows,
    cols,
    dy_row_stride,
    dhandle_row_stride,
    mask,
    NEXT_ALPHA_VECTOR: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Returns dy, or dy + next_alpha * dhandle: what the branch and the residual of the next site ask for together."""
    dy = load_tile(dy_ptr, rows, cols, dy_row_stride, mask, CACHE)
    if dhandle_ptr is not None:
        dhandle = load_tile(dhandle_ptr, rows, cols, dhandle_row_stride, mask, CACHE)
        dy = load_factor(next_alpha_ptr, cols, mask, NEXT_ALPHA_VECTOR) * dhandle + dy
    return dy


@triton.jit
def centred(z, moments_ptr, rows, n_rows, LAYERNORM: tl.constexpr):
    """Returns the normalised tile and 1 / std from the saved moments [mean, shift, rstd] or [rstd], each n_rows long.

    The mean is kept as two numbers, since one fp32 number is off by 0.4 % of a std where the mean is 10^5 of it.
    """
    inside = rows < n_rows
    if LAYERNORM:
        mean = tl.load(moments_ptr + rows, mask=inside, other=0.0)
        shift = tl.load(moments_ptr + n_rows + rows, mask=inside, other=0.0)
        rstd = tl.load(moments_ptr + n_rows + n_rows + rows, mask=inside, other=0.0)
        z = (z - mean[:, None]) - shift[:, None]
    else:
        rstd = tl.load(moments_ptr + rows, mask=inside, other=0.0)
    return z * rstd[:, None], rstd


@triton.jit
def inverse_root(variance, eps):
    """Returns 1 / sqrt(variance + eps); NaN where the variance is not finite, for 1 / sqrt(Inf) is a number."""
    variance = tl.where(variance < 0.0, 0.0, variance)  # by rounding, where all entries are equal
    return tl.where(variance < float("inf"), tl.rsqrt(variance + eps), float("nan"))


@triton.jit
def row_extremes(tile):
    """Returns of each row the largest absolute value without NaN, and non-finite entries + 65536 * NaN entries.

    A maximum drops NaN, so NaN is counted apart; both counts fit one integer for widths below 32768.
    """
    magnitude = tl.abs(tile)
    is_nan = tile != tile
    largest = tl.max(tl.where(is_nan, 0.0, magnitude), axis=1)
    counts = tl.sum(tl.where(is_nan, 65537, tl.where(magnitude == float("inf"), 1, 0)), axis=1)
    return largest, counts


@triton.jit
def store_partial(ptr, squares, largest, nonfinite, nan):
    """Writes what one program saw: sum of squares, largest absolute value, non-finite and NaN entries."""
    tl.store(ptr, tl.sum(squares, axis=0))
    tl.store(ptr + 1, tl.max(largest, axis=0))
    tl.store(ptr + 2, tl.sum(nonfinite, axis=0).to(tl.float32))
    tl.store(ptr + 3, tl.sum(nan, axis=0).to(tl.float32))
