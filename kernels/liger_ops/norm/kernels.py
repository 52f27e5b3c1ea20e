"""What norms over rows share: RMSNorm, RMSNorm of a sum and LayerNorm are one algorithm with parts left out.

With x the row (the rounded sum of two rows, where a residual is added first), c = x - mean (x itself unless CENTERED),
rstd = 1 / sqrt(mean(c**2) + eps), n = c * rstd and s = offset + weight, a row is y = n * s + bias, and

    dx = rstd * (dy * s - n * mean(dy * s * n) - mean(dy * s)) + gradient of the sum
    dweight = sum over rows of dy * n        dbias = sum over rows of dy

where mean(dy * s) is there only if CENTERED. Arithmetic is float32; roundings on the way to y (see ``rms_norm``) count
as the identity in backward.

Forward and backward hold a whole row in registers and read it once. The backward kernel runs a fixed number of
programs, each walking over many rows and keeping its parts of dweight and dbias in registers; a second kernel adds the
parts up in a fixed order, so results repeat. Rows that do not fit are walked over in blocks: forward reads them twice,
the second time from the L2 cache while few enough rows are under way; backward takes the two means in a kernel of their
own, after which columns are independent and a program can keep to a few of them.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend


def check_shapes(input: Tensor, normalized_shape: tuple[int, ...], **parameters: Tensor | None) -> None:
    """Raises ValueError unless ``normalized_shape`` are the input's trailing sizes and the parameters have them."""
    num_dims = len(normalized_shape)
    if num_dims == 0 or 0 in normalized_shape or input.shape[-num_dims:] != normalized_shape:
        raise ValueError(
            "normalized_shape must be input's trailing sizes, positive and at least one, got"
            f" {normalized_shape} for input of shape {tuple(input.shape)}"
        )
    for name, parameter in parameters.items():
        if parameter is not None and parameter.shape != normalized_shape:
            raise ValueError(
                f"{name} must have shape normalized_shape = {normalized_shape}, got {tuple(parameter.shape)}"
            )


def runs_on_triton(input: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels take these tensors: where ``input`` is and of dtypes they compute in."""
    if not backend.use_triton(input) or input.dtype == torch.float64:
        return False
    return all(tensor is None or tensor.dtype != torch.float64 for tensor in others)


@dataclass(frozen=True)
class RowLaunch:
    """Tile that a program holds at a time, how many programs share the rows, and how far ahead it loads."""

    block_rows: int
    block_size: int
    num_warps: int
    num_programs: int  # sharing the rows; in backward of long rows, as many for each block of columns
    num_stages: int = 1
    reload_weight: bool = False  # load weight and bias when a tile needs them instead of keeping them in registers


_MAX_FORWARD_SIZE = 16384
_L2_BYTES_PER_MULTIPROCESSOR = 2**18


@functools.cache
def choose_forward_launch(
    num_rows: int, hidden_size: int, element_size: int, num_multiprocessors: int, *, centered: bool
) -> RowLaunch:
    """A whole row in one tile, or as many short ones as make 2048 elements; one tile a program.

    On an H200 in bfloat16, RMSNorm of rows of 128 to 16384 columns: 3.5 to 4.0 TB/s where a copy reaches 3.9 to 4.2.
    Of programs that center 16384 columns a multiprocessor has registers for one only, which loads rows ahead instead.
    Longer rows are shared by so few programs that all rows under way fit into the L2 cache.
    """
    block_size = triton.next_power_of_2(hidden_size)
    if block_size > _MAX_FORWARD_SIZE:
        programs = max(1, min(4, _L2_BYTES_PER_MULTIPROCESSOR // (hidden_size * element_size)))
        return RowLaunch(1, 4096, num_warps=8, num_programs=min(num_rows, programs * num_multiprocessors))
    if block_size == _MAX_FORWARD_SIZE and element_size == 2:
        return RowLaunch(1, block_size, num_warps=16, num_programs=min(num_rows, num_multiprocessors), num_stages=3)
    if block_size == 8192 != hidden_size and not centered:
        return RowLaunch(1, block_size, num_warps=8, num_programs=min(num_rows, 2 * num_multiprocessors), num_stages=3)
    block_rows = max(1, (4096 if centered else 2048) // block_size)
    if centered and block_size == 4096:
        block_rows = 2
    num_warps = min(8, max(4, block_rows * block_size // (1024 if centered else 512)))
    num_programs = triton.cdiv(num_rows, block_rows)
    return RowLaunch(block_rows, block_size, num_warps, num_programs, reload_weight=True)


@dataclass(frozen=True)
class SumLaunch:
    """Tile that a program adds up at a time."""

    block_parts: int
    block_columns: int
    num_warps: int


@functools.cache
def choose_sum_launch(num_columns: int, num_multiprocessors: int) -> SumLaunch:
    """Two programs a multiprocessor, of at least half a line of memory and at most four."""
    block_columns = triton.next_power_of_2(triton.cdiv(num_columns, 2 * num_multiprocessors))
    block_columns = min(128, max(16, block_columns))
    return SumLaunch(4096 // block_columns, block_columns, num_warps=4)


_PROJECTION_BLOCK_SIZE = 2048
_TILE_BYTES = 16384
_REGISTER_BYTES = 192 * 1024
_LONG_ROW = 16384  # from here on registers are short


@functools.cache
def choose_backward_launch(
    num_rows: int,
    hidden_size: int,
    element_size: int,
    num_multiprocessors: int,
    *,
    num_inputs: int,
    num_sums: int,
    shared_bytes: int,
) -> RowLaunch:
    """Tiles of 16 KB, or of one longer row; one program a multiprocessor, which loads tiles ahead while they fit.

    Rows that would overflow the registers are cut into blocks of columns, each with programs of its own.

    Args:
        num_rows: How many rows there are.
        hidden_size: Their length.
        element_size: Bytes of the widest tensor's elements.
        num_multiprocessors: How many programs run at once.
        num_inputs: How many tensors of the input's size are read: two, or three with the gradient of the sum.
        num_sums: How many sums over the rows are kept: of weight, of bias.
        shared_bytes: Shared memory of a program, where tiles wait that are loaded ahead.
    """
    block_size = triton.next_power_of_2(hidden_size)
    masked_long_row = _LONG_ROW <= block_size != hidden_size
    overflows = block_size * (2 * element_size + 4 * num_sums) > _REGISTER_BYTES
    if overflows or (masked_long_row and num_sums == 2):
        programs = max(1, num_multiprocessors // triton.cdiv(hidden_size, 2048))
        tiles_ahead = min(2, shared_bytes // (4 * 2048 * element_size * num_inputs))
        return RowLaunch(
            4, 2048, num_warps=8, num_programs=min(triton.cdiv(num_rows, 4), programs), num_stages=1 + tiles_ahead
        )
    if num_sums == 2 and block_size <= 1024:
        block_rows = max(1, 4096 // block_size)
        num_programs = min(triton.cdiv(num_rows, block_rows), 2 * num_multiprocessors)
        return RowLaunch(block_rows, block_size, num_warps=4, num_programs=num_programs, num_stages=3)
    block_rows = max(1, _TILE_BYTES // (block_size * element_size))
    tile_bytes = block_rows * block_size * element_size
    # Two sums of a row this long leave no registers for the weight, which is then loaded twice a tile.
    reload_weight = num_sums == 2 and tile_bytes > _TILE_BYTES
    bytes_ahead = tile_bytes * (num_inputs + 2 * reload_weight)
    tiles_ahead = 3 if 4 * hidden_size <= 3 * block_size and not masked_long_row else 2
    num_warps = 32 if masked_long_row else 16 if block_size >= _LONG_ROW and num_sums == 2 else 8
    return RowLaunch(
        block_rows=block_rows,
        block_size=block_size,
        num_warps=num_warps,
        num_programs=min(triton.cdiv(num_rows, block_rows), num_multiprocessors),
        num_stages=1 + min(tiles_ahead, shared_bytes // bytes_ahead),
        reload_weight=reload_weight,
    )


@triton.jit
def _exists(indices, limit, ALL: tl.constexpr):
    """Whether rows or columns exist; loads come out unmasked where that is plain at compile time."""
    if ALL:
        return tl.full([1, 1], True, dtype=tl.int1)
    else:
        return indices < limit


@triton.jit
def _load_x(x_ptr, x_offsets, residual_ptr, residual_offsets, total_ptr, mask):
    """What is normalised, in its own dtype: x, or the rounded sum of x and the residual."""
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


@triton.jit
def moments(x_ptr, length, first_block, block_step, BLOCK_SIZE: tl.constexpr, NUM_STAGES: tl.constexpr):
    """Count, mean and sum of squared deviations of every ``block_step``-th block of ``x_ptr[:length]``.

    Each lane keeps a running mean and deviation of its own (Welford, Technometrics 4, 1962); lanes meet at the end.
    """
    lanes = tl.arange(0, BLOCK_SIZE)
    mean = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    deviation = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    num_seen = 0.0
    for block in tl.range(first_block, tl.cdiv(length, BLOCK_SIZE), block_step, num_stages=NUM_STAGES):
        offsets = block * BLOCK_SIZE + lanes
        mask = offsets < length
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        num_seen += 1.0
        delta = tl.where(mask, x - mean, 0.0)
        mean += delta * (1.0 / num_seen)
        deviation += delta * (x - mean)
    last_block = length // BLOCK_SIZE
    in_last_block = (last_block - first_block) % block_step == 0
    num_full = num_seen - tl.where(in_last_block & (length % BLOCK_SIZE > 0), 1.0, 0.0)
    count = tl.where(lanes < length % BLOCK_SIZE, num_seen, num_full)
    return merge_moments(count, mean, deviation)


@triton.jit
def merge_moments(count, mean, deviation):
    """The same three numbers of all lanes together (Chan, Golub and LeVeque, 1979)."""
    total_count = tl.sum(count, axis=0)
    total_mean = tl.sum(count * mean, axis=0) / total_count
    distance = mean - total_mean
    return total_count, total_mean, tl.sum(deviation + count * distance * distance, axis=0)


@backend.Kernel
def _forward_kernel(
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
    """One program normalises every num_programs-th tile of BLOCK_ROWS rows."""
    columns = tl.arange(0, BLOCK_SIZE)[None, :]
    column_mask = _exists(columns, hidden_size, EVEN_COLUMNS)
    if not RELOAD_WEIGHT:
        weight = None if weight_ptr is None else tl.load(weight_ptr + columns, mask=column_mask, other=0.0)
        bias = None if bias_ptr is None else tl.load(bias_ptr + columns, mask=column_mask, other=0.0)
    num_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=NUM_STAGES):
        rows = (tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
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
def _long_forward_kernel(
    x_ptr,  # all as in _forward_kernel
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    statistics_ptr,
    x_row_stride,
    residual_row_stride,
    num_rows,
    hidden_size,
    eps,
    offset,
    CENTERED: tl.constexpr,
    CASTING: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program normalises every num_programs-th row, block by block, once its statistics are known."""
    for row in range(tl.program_id(0).to(tl.int64), num_rows, tl.num_programs(0)):
        x_row, residual_row = row * x_row_stride, row * residual_row_stride
        mean = 0.0
        if CENTERED:
            _, mean, sum_of_squares = moments(x_ptr + x_row, hidden_size, 0, 1, BLOCK_SIZE, NUM_STAGES)
            tl.store(statistics_ptr + num_rows + row, mean)
        else:
            squares = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
            for start in tl.range(0, hidden_size, BLOCK_SIZE, num_stages=NUM_STAGES):
                columns = start + tl.arange(0, BLOCK_SIZE)
                mask = columns < hidden_size
                x = _load_x(x_ptr, x_row + columns, residual_ptr, residual_row + columns, total_ptr, mask)
                squares += x.to(tl.float32) * x.to(tl.float32)
            sum_of_squares = tl.sum(squares, axis=0)
        rstd = tl.rsqrt(sum_of_squares / hidden_size + eps)
        tl.store(statistics_ptr + row, rstd)
        for start in tl.range(0, hidden_size, BLOCK_SIZE, num_stages=NUM_STAGES):
            columns = start + tl.arange(0, BLOCK_SIZE)
            mask = columns < hidden_size
            weight = None if weight_ptr is None else tl.load(weight_ptr + columns, mask=mask, other=0.0)
            bias = None if bias_ptr is None else tl.load(bias_ptr + columns, mask=mask, other=0.0)
            x = _load_x(x_ptr, x_row + columns, residual_ptr, residual_row + columns, total_ptr, mask)
            if total_ptr is not None:
                tl.store(total_ptr + row * hidden_size + columns, x, mask=mask)
            y = _normalize(x.to(tl.float32) - mean, rstd, weight, bias, offset, x.dtype, CASTING)
            tl.store(y_ptr + row * hidden_size + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@backend.Kernel
def _backward_kernel(
    x_ptr,  # [num_rows, hidden_size]
    grad_y_ptr,  # [num_rows, hidden_size]
    grad_total_ptr,  # [num_rows, hidden_size] or None
    weight_ptr,  # [hidden_size] or None
    statistics_ptr,  # as in _forward_kernel
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
    for tile in tl.range(part, tl.cdiv(num_rows, BLOCK_ROWS), num_parts, num_stages=NUM_STAGES):
        rows = (tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
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
def _projections_kernel(
    x_ptr,  # all as in _backward_kernel
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


@triton.jit
def _sum_part(
    part_ptrs, sum_ptrs, num_parts, num_columns, mask, BLOCK_PARTS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    total = tl.zeros([BLOCK_PARTS, BLOCK_COLUMNS], dtype=tl.float32)
    for start in range(0, num_parts, BLOCK_PARTS):
        parts = start + tl.arange(0, BLOCK_PARTS)[:, None]
        total += tl.load(part_ptrs + parts * num_columns, mask=(parts < num_parts) & mask, other=0.0)
    tl.store(sum_ptrs, tl.sum(total, axis=0)[None, :].to(sum_ptrs.dtype.element_ty), mask=mask)


@backend.Kernel
def _sum_parts_kernel(
    parts_ptr,  # [num_parts, num_columns] of the weight's gradient, then of the bias's; float32
    grad_weight_ptr,  # [num_columns] or None, if there are no such parts
    grad_bias_ptr,  # likewise
    num_parts,
    num_columns,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program adds up BLOCK_COLUMNS columns."""
    columns = (tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS))[None, :]
    mask = columns < num_columns
    part_ptrs = parts_ptr + columns
    if grad_weight_ptr is not None:
        weight_ptrs = grad_weight_ptr + columns
        _sum_part(part_ptrs, weight_ptrs, num_parts, num_columns, mask, BLOCK_PARTS, BLOCK_COLUMNS)
        part_ptrs += num_parts * num_columns
    if grad_bias_ptr is not None:
        bias_ptrs = grad_bias_ptr + columns
        _sum_part(part_ptrs, bias_ptrs, num_parts, num_columns, mask, BLOCK_PARTS, BLOCK_COLUMNS)


def _as_rows(tensor: Tensor | None, num_columns: int) -> tuple[Tensor | None, int]:
    """A tensor to whose start a kernel adds ``row * stride + column``, and that stride."""
    if tensor is None:
        return None, 0
    if tensor.is_contiguous():
        return tensor, num_columns
    rows = backend.as_rows(tensor, num_columns)
    return rows, rows.stride(0)


def sum_parts(parts: Tensor, grad_weight: Tensor | None, grad_bias: Tensor | None) -> None:
    """Adds up ``parts``, ``[1 or 2, num_parts, num_columns]``, into the gradients that are wanted, in a fixed order."""
    num_parts, num_columns = parts.shape[1:]
    launch = choose_sum_launch(num_columns, backend.num_multiprocessors(parts.device))
    _sum_parts_kernel.launch(
        -(-num_columns // launch.block_columns),
        parts_ptr=parts,
        grad_weight_ptr=grad_weight,
        grad_bias_ptr=grad_bias,
        num_parts=num_parts,
        num_columns=num_columns,
        BLOCK_PARTS=launch.block_parts,
        BLOCK_COLUMNS=launch.block_columns,
        num_warps=launch.num_warps,
    )


def launch_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    hidden_size: int,
    *,
    y: Tensor,
    statistics: Tensor,
    centered: bool,
    eps: float,
    offset: float = 0.0,
    casting: str = "gemma",
    residual: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    """Normalises rows of ``hidden_size`` elements.

    Args:
        x: ``[*, hidden_size]``, or whatever has so many elements, as have ``residual``, ``total`` and ``y``.
        weight: ``hidden_size`` elements, or None.
        bias: Likewise.
        hidden_size: Length of a row.
        y: Contiguous, written.
        statistics: ``[1, num_rows]``, rstd, or ``[2, num_rows]``, rstd and mean, if ``centered``; written.
        centered: Whether the mean is taken off: LayerNorm.
        eps: Added to the variance.
        offset: Added to the weight.
        casting: Where y is rounded, see ``rms_norm``.
        residual: Added to ``x`` first.
        total: Contiguous, written with that sum; None without a residual.
    """
    num_rows = statistics.shape[1]
    if num_rows == 0:
        return
    rows, row_stride = _as_rows(x, hidden_size)
    residual_rows, residual_row_stride = _as_rows(residual, hidden_size)
    num_multiprocessors = backend.num_multiprocessors(x.device)
    launch = choose_forward_launch(num_rows, hidden_size, x.element_size(), num_multiprocessors, centered=centered)
    arguments = {
        "x_ptr": rows,
        "residual_ptr": residual_rows,
        "weight_ptr": None if weight is None else weight.contiguous(),
        "bias_ptr": None if bias is None else bias.contiguous(),
        "y_ptr": y,
        "total_ptr": total,
        "statistics_ptr": statistics,
        "x_row_stride": row_stride,
        "residual_row_stride": residual_row_stride,
        "num_rows": num_rows,
        "hidden_size": hidden_size,
        "eps": eps,
        "offset": offset or None,
        "CENTERED": centered,
        "CASTING": casting,
        "BLOCK_SIZE": launch.block_size,
        "NUM_STAGES": launch.num_stages,
        "num_warps": launch.num_warps,
    }
    if launch.block_size < hidden_size:
        _long_forward_kernel.launch(launch.num_programs, **arguments)
    else:
        _forward_kernel.launch(
            launch.num_programs,
            EVEN_ROWS=num_rows % launch.block_rows == 0,
            EVEN_COLUMNS=hidden_size == launch.block_size,
            RELOAD_WEIGHT=launch.reload_weight,
            HOLD_PACKED=launch.block_size >= _LONG_ROW,
            BLOCK_ROWS=launch.block_rows,
            **arguments,
        )


def launch_backward(
    x: Tensor,
    grad_y: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    hidden_size: int,
    *,
    centered: bool,
    offset: float = 0.0,
    grad_total: Tensor | None = None,
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None = None,
) -> None:
    """Computes the gradients that are not None.

    Args:
        x: What was normalised: with a residual, the sum.
        grad_y: Of as many elements as ``x``.
        weight: ``hidden_size`` elements, or None.
        statistics: As written by :func:`launch_forward`.
        hidden_size: Length of a row.
        centered: As in forward.
        offset: As in forward.
        grad_total: The sum's gradient from elsewhere, which ``grad_x`` then includes.
        grad_x: Contiguous, of as many elements as ``x``, written.
        grad_weight: ``hidden_size`` elements, written.
        grad_bias: Likewise.
    """
    num_rows = statistics.shape[1]
    num_sums = (grad_weight is not None) + (grad_bias is not None)
    rows, row_stride = _as_rows(x, hidden_size)
    grad_y_rows, grad_y_row_stride = _as_rows(grad_y, hidden_size)
    grad_total_rows, grad_total_row_stride = _as_rows(grad_total, hidden_size)
    weight = None if weight is None else weight.contiguous()
    num_multiprocessors = backend.num_multiprocessors(x.device)
    launch = choose_backward_launch(
        num_rows,
        hidden_size,
        max(x.element_size(), grad_y.element_size()),
        num_multiprocessors,
        num_inputs=2 if grad_total is None else 3,
        num_sums=num_sums,
        shared_bytes=backend.shared_memory(x.device),
    )
    shared = {
        "x_ptr": rows,
        "grad_y_ptr": grad_y_rows,
        "weight_ptr": weight,
        "statistics_ptr": statistics,
        "x_row_stride": row_stride,
        "grad_y_row_stride": grad_y_row_stride,
        "num_rows": num_rows,
        "hidden_size": hidden_size,
        "offset": offset or None,
        "CENTERED": centered,
    }
    projections = None
    num_blocks = -(-hidden_size // launch.block_size)  # triton.cdiv takes microseconds
    if num_blocks > 1 and grad_x is not None and num_rows > 0:
        projections = torch.empty_like(statistics)
        _projections_kernel.launch(
            num_rows,
            projections_ptr=projections,
            BLOCK_SIZE=_PROJECTION_BLOCK_SIZE,
            NUM_STAGES=3,
            num_warps=8,
            **shared,
        )
    parts = statistics.new_empty(num_sums, launch.num_programs, hidden_size) if num_sums else None
    if num_rows > 0:
        _backward_kernel.launch(
            launch.num_programs * num_blocks,
            grad_total_ptr=grad_total_rows,
            projections_ptr=projections,
            grad_x_ptr=grad_x,
            parts_ptr=parts,
            grad_total_row_stride=grad_total_row_stride,
            num_parts=launch.num_programs,
            GRAD_WEIGHT=grad_weight is not None,
            GRAD_BIAS=grad_bias is not None,
            EVEN_ROWS=num_rows % launch.block_rows == 0,
            EVEN_COLUMNS=hidden_size % launch.block_size == 0,
            RELOAD_WEIGHT=launch.reload_weight,
            HOLD_PACKED=launch.block_size >= _LONG_ROW,
            BLOCK_ROWS=launch.block_rows,
            BLOCK_SIZE=launch.block_size,
            NUM_STAGES=launch.num_stages,
            num_warps=launch.num_warps,
            **shared,
        )
    if parts is not None:
        sum_parts(parts, grad_weight, grad_bias)
