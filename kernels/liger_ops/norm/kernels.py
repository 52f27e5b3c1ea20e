"""Kernels of the norms over rows: RMSNorm, RMSNorm of a sum and LayerNorm are one algorithm with parts left out.

With x the row (the rounded sum of two rows, where a residual is added first), c = x - mean (x itself unless CENTERED),
rstd = 1 / sqrt(mean(c**2) + eps), n = c * rstd and s = offset + weight, a row is y = n * s + bias, and

    dx = rstd * (dy * s - n * mean(dy * s * n) - mean(dy * s)) + gradient of the sum
    dweight = sum over rows of dy * n        dbias = sum over rows of dy

where mean(dy * s) is there only if CENTERED. Arithmetic is float32; roundings on the way to y (see ``rms_norm``) count
as the identity in backward.

Forward and backward hold a whole row in registers and read it once. The backward kernel runs a fixed number of
programs, each walking over many rows and keeping its parts of dweight and dbias in registers; a second kernel adds the
parts up in a fixed order, so results repeat. For rows whose sums do not fit, backward takes the two means in a separate
kernel, after which columns are independent and a program needs only a few of them.
"""

import triton
import triton.language as tl

from liger_ops import backend


@triton.jit
def _exists(indices, limit, ALL: tl.constexpr):
    """Whether rows or columns exist; loads are unmasked where the compiler knows that all do."""
    if ALL:
        return tl.full([1, 1], True, dtype=tl.int1)
    else:
        return indices < limit


@triton.jit
def _load_x(x_ptr, x_offsets, residual_ptr, residual_offsets, total_ptr, mask):
    """The values to normalize, unconverted: x, or the rounded sum of x and the residual."""
    x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0)
    if residual_ptr is None:
        return x
    else:
        residual = tl.load(residual_ptr + residual_offsets, mask=mask, other=0.0)
        return (x.to(tl.float32) + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)


@triton.jit
def _scale(weight, offset):
    """offset + weight in float32; an offset of 0 is passed as None and costs nothing."""
    if offset is None:
        return weight.to(tl.float32)
    else:
        return offset + weight.to(tl.float32)


@triton.jit
def _normalize(centered, rstd, weight, bias, offset, DTYPE: tl.constexpr, CASTING: tl.constexpr):
    """y in float32, from x less its mean in float32 and x's dtype; weight and bias may be None."""
    if CASTING == "none":
        rstd = rstd.to(DTYPE).to(tl.float32)
    y = centered * rstd
    if CASTING != "gemma":
        y = y.to(DTYPE).to(tl.float32)
    if weight is not None:
        scale = _scale(weight, offset)
        if CASTING == "none":
            scale = scale.to(weight.dtype).to(tl.float32)
        y *= scale
    if bias is not None:
        y += bias.to(tl.float32)
    return y


@triton.jit
def _standardize(x, mean, rstd, DTYPE: tl.constexpr, CENTERED: tl.constexpr):
    """(x - mean) * rstd; for x of half precision in one instruction, whose error is far below x's own."""
    if not CENTERED:
        return x * rstd
    elif tl.float32 == DTYPE:
        return (x - mean) * rstd
    else:
        return x * rstd - mean * rstd


@triton.jit
def _convert_again(tile, statistic, HOLD_PACKED: tl.constexpr):
    """``tile`` in float32, with ``HOLD_PACKED`` converted as if for the first time.

    Setting bits that are 0 (but for NaN, when the row is lost anyway), which the compiler cannot know, keeps it from
    holding on to an earlier conversion, which would take twice the registers while a row's sums are under way.
    """
    if HOLD_PACKED and tile.dtype != tl.float32:
        bits = tile.to(tl.int16, bitcast=True) | (statistic != statistic).to(tl.int16)
        return bits.to(tile.dtype, bitcast=True).to(tl.float32)
    else:
        return tile.to(tl.float32)


@backend.Kernel
def forward_kernel(
    x_ptr,  # [num_rows, hidden_size]
    residual_ptr,  # [num_rows, hidden_size] or None
    weight_ptr,  # [hidden_size] or None
    bias_ptr,  # [hidden_size] or None
    y_ptr,  # [num_rows, hidden_size], contiguous
    total_ptr,  # [num_rows, hidden_size], contiguous, x plus residual; None without one
    statistics_ptr,  # [num_rows] rstd, then, if CENTERED, mean
    x_row_stride,
    residual_row_stride,
    num_rows,
    hidden_size,
    eps,
    offset,
    CENTERED: tl.constexpr,
    CASTING: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr,
    RELOAD_WEIGHT: tl.constexpr,
    HOLD_PACKED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program normalizes every num_programs-th tile of BLOCK_ROWS rows."""
    columns = tl.arange(0, BLOCK_SIZE)[None, :]
    column_mask = _exists(columns, hidden_size, EVEN_COLUMNS)
    if not RELOAD_WEIGHT:
        weight = None if weight_ptr is None else tl.load(weight_ptr + columns, mask=column_mask, other=0.0)
        bias = None if bias_ptr is None else tl.load(bias_ptr + columns, mask=column_mask, other=0.0)
    num_tiles = (num_rows - 1) // BLOCK_ROWS + 1  # cdiv would overflow just below 2**31 rows
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=NUM_STAGES):
        rows = (tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
        row_mask = _exists(rows, num_rows, EVEN_ROWS)
        mask = row_mask & column_mask
        x_offsets, residual_offsets = rows * x_row_stride + columns, rows * residual_row_stride + columns
        x = _load_x(x_ptr, x_offsets, residual_ptr, residual_offsets, total_ptr, mask)
        if total_ptr is not None:
            tl.store(total_ptr + rows * hidden_size + columns, x, mask=mask)
        centered = x.to(tl.float32)
        mean = 0.0
        if CENTERED:
            mean = tl.sum(centered, axis=1)[:, None] / hidden_size
            tl.store(statistics_ptr + num_rows + rows, mean, mask=row_mask)
            centered = tl.where(column_mask, _convert_again(x, mean, HOLD_PACKED) - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(centered * centered, axis=1)[:, None] / hidden_size + eps)
        tl.store(statistics_ptr + rows, rstd, mask=row_mask)
        if RELOAD_WEIGHT:
            weight = None if weight_ptr is None else tl.load(weight_ptr + columns, mask=column_mask, other=0.0)
            bias = None if bias_ptr is None else tl.load(bias_ptr + columns, mask=column_mask, other=0.0)
        centered = _convert_again(x, rstd, HOLD_PACKED) - mean
        y = _normalize(centered, rstd, weight, bias, offset, x.dtype, CASTING)
        tl.store(y_ptr + rows * hidden_size + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@backend.Kernel
def backward_kernel(
    x_ptr,  # [num_rows, hidden_size]
    grad_y_ptr,  # [num_rows, hidden_size]
    grad_total_ptr,  # [num_rows, hidden_size] or None
    weight_ptr,  # [hidden_size] or None
    statistics_ptr,  # as in forward_kernel
    projections_ptr,  # [num_rows] mean(dy * s * n), then, if CENTERED, mean(dy * s); None where a block is a row
    grad_x_ptr,  # [num_rows, hidden_size], contiguous, or None
    parts_ptr,  # [num_parts, hidden_size] if GRAD_WEIGHT, then [num_parts, hidden_size] if GRAD_BIAS; float32
    x_row_stride,
    grad_y_row_stride,
    grad_total_row_stride,
    num_rows,
    hidden_size,
    num_parts,
    offset,
    CENTERED: tl.constexpr,
    GRAD_WEIGHT: tl.constexpr,
    GRAD_BIAS: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr,
    RELOAD_WEIGHT: tl.constexpr,
    HOLD_PACKED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program takes a block of columns of every num_parts-th tile of BLOCK_ROWS rows: grad_x and the rows' sum."""
    part = tl.program_id(0) % num_parts
    columns = (tl.program_id(0) // num_parts * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE))[None, :]
    column_mask = _exists(columns, hidden_size, EVEN_COLUMNS)
    if weight_ptr is not None and not RELOAD_WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=column_mask, other=0.0)
    grad_weight = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], dtype=tl.float32)
    grad_bias = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], dtype=tl.float32)
    num_tiles = (num_rows - 1) // BLOCK_ROWS + 1
    for tile in tl.range(part, num_tiles, num_parts, num_stages=NUM_STAGES):
        rows = (tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
        row_mask = _exists(rows, num_rows, EVEN_ROWS)
        mask = row_mask & column_mask
        packed_grad_y = tl.load(grad_y_ptr + rows * grad_y_row_stride + columns, mask=mask, other=0.0)
        packed_x = tl.load(x_ptr + rows * x_row_stride + columns, mask=mask, other=0.0)
        rstd = tl.load(statistics_ptr + rows, mask=row_mask, other=0.0)
        mean = tl.load(statistics_ptr + num_rows + rows, mask=row_mask, other=0.0) if CENTERED else 0.0
        normalized = _standardize(packed_x.to(tl.float32), mean, rstd, packed_x.dtype, CENTERED)
        grad_y = packed_grad_y.to(tl.float32)
        if GRAD_WEIGHT:
            grad_weight += grad_y * normalized
        if GRAD_BIAS:
            grad_bias += grad_y
        if grad_x_ptr is not None:
            grad_mean = 0.0
            if projections_ptr is None:
                if weight_ptr is not None:
                    if RELOAD_WEIGHT:
                        weight = tl.load(weight_ptr + columns, mask=column_mask, other=0.0)
                    grad_y *= _scale(weight, offset)
                if CENTERED:  # both means in one reduction
                    sums = tl.sum(tl.join(grad_y * normalized, grad_y), axis=1) / hidden_size
                    projection, grad_mean = tl.split(sums)
                    projection, grad_mean = projection[:, None], grad_mean[:, None]
                else:
                    projection = tl.sum(grad_y * normalized, axis=1)[:, None] / hidden_size
                grad_y = _convert_again(packed_grad_y, rstd, HOLD_PACKED)
                x = _convert_again(packed_x, rstd, HOLD_PACKED)
                normalized = _standardize(x, mean, rstd, packed_x.dtype, CENTERED)
            else:
                projection = tl.load(projections_ptr + rows, mask=row_mask, other=0.0)
                if CENTERED:
                    grad_mean = tl.load(projections_ptr + num_rows + rows, mask=row_mask, other=0.0)
            if weight_ptr is not None:
                if RELOAD_WEIGHT:
                    # Another policy, or the compiler would keep what it loaded above.
                    weight = tl.load(weight_ptr + columns, mask=column_mask, other=0.0, eviction_policy="evict_last")
                grad_y *= _scale(weight, offset)
            grad_x = rstd * (grad_y - (normalized * projection + grad_mean))
            if grad_total_ptr is not None:
                grad_total_ptrs = grad_total_ptr + rows * grad_total_row_stride + columns
                grad_x += tl.load(grad_total_ptrs, mask=mask, other=0.0).to(tl.float32)
            grad_x_ptrs = grad_x_ptr + rows * hidden_size + columns
            tl.store(grad_x_ptrs, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    part_offsets = part * hidden_size + columns
    if GRAD_WEIGHT:
        tl.store(parts_ptr + part_offsets, tl.sum(grad_weight, axis=0)[None, :], mask=column_mask)
        part_offsets += num_parts * hidden_size
    if GRAD_BIAS:
        tl.store(parts_ptr + part_offsets, tl.sum(grad_bias, axis=0)[None, :], mask=column_mask)


@backend.Kernel
def projections_kernel(
    x_ptr,  # all as in backward_kernel
    grad_y_ptr,
    weight_ptr,
    statistics_ptr,
    projections_ptr,
    x_row_stride,
    grad_y_row_stride,
    num_rows,
    hidden_size,
    offset,
    CENTERED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes the means that one long row's gradient needs."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(statistics_ptr + row)
    mean = tl.load(statistics_ptr + num_rows + row) if CENTERED else 0.0
    products = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    gradients = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in tl.range(0, hidden_size, BLOCK_SIZE, num_stages=NUM_STAGES):
        columns = start + tl.arange(0, BLOCK_SIZE)
        mask = columns < hidden_size
        x = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + row * grad_y_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            grad_y *= _scale(tl.load(weight_ptr + columns, mask=mask, other=0.0), offset)
        products += grad_y * (x - mean)
        gradients += grad_y
    tl.store(projections_ptr + row, tl.sum(products, axis=0) * rstd / hidden_size)
    if CENTERED:
        tl.store(projections_ptr + num_rows + row, tl.sum(gradients, axis=0) / hidden_size)
