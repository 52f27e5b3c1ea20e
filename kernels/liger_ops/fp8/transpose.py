"""Transposed payloads, which the backward products of Hopper's tensor cores need in memory.

The gradient of a weight is a sum over tokens, dW[n, k] = sum over m of g[m, n] x[m, k], of rows that have a scale each.
With c[m] = log2(scale of g's row m * scale of x's row m) and C the largest of them, each row's payloads are multiplied
by powers of two whose product is 2**(c[m] - C), half of the exponent each, so that the sum has one scale, 2**C. That is
exact but for values which thereby fall below e4m3's smallest normal, far below the largest tokens'.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.fp8.rows import E4M3, exponent_of, is_interpreted, power_of_two, to_e4m3

TOKEN_MULTIPLE = 16
"""Of the length of a product's summed dimension."""


@triton.jit
def _common_exponent(x_exponent, g_exponent):
    is_lost = (x_exponent == 128) | (g_exponent == 128)
    return tl.where(is_lost, 10000, x_exponent + g_exponent)


@backend.Kernel
def _align_kernel(
    x_scale_ptr,  # [num_rows]
    g_scale_ptr,  # [num_rows]
    channel_scale_ptr,  # [num_channels]
    x_factor_ptr,  # [num_rows]
    g_factor_ptr,  # [num_rows]
    weight_scale_ptr,  # [num_channels]
    num_rows,
    num_channels,
    X_IS_PAYLOAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Each program finds the largest exponent of all, and writes every num_programs-th block."""
    block = tl.arange(0, BLOCK_SIZE)
    largest = tl.full([BLOCK_SIZE], -10000, tl.int32)
    for start in range(0, num_rows, BLOCK_SIZE):
        mask = start + block < num_rows
        x_exponent = exponent_of(tl.load(x_scale_ptr + start + block, mask=mask, other=1.0))
        g_exponent = exponent_of(tl.load(g_scale_ptr + start + block, mask=mask, other=1.0))
        largest = tl.maximum(largest, tl.where(mask, _common_exponent(x_exponent, g_exponent), -10000))
    largest = tl.max(largest)
    stride = tl.num_programs(0) * BLOCK_SIZE
    for start in range(tl.program_id(0) * BLOCK_SIZE, num_rows, stride):
        mask = start + block < num_rows
        x_exponent = exponent_of(tl.load(x_scale_ptr + start + block, mask=mask, other=1.0))
        g_exponent = exponent_of(tl.load(g_scale_ptr + start + block, mask=mask, other=1.0))
        shift = _common_exponent(x_exponent, g_exponent) - largest
        x_shift = shift >> 1
        x_factor = power_of_two(x_shift if X_IS_PAYLOAD else x_shift - x_exponent)
        tl.store(x_factor_ptr + start + block, x_factor, mask=mask)
        tl.store(g_factor_ptr + start + block, power_of_two(shift - x_shift), mask=mask)
    for start in range(tl.program_id(0) * BLOCK_SIZE, num_channels, stride):
        mask = start + block < num_channels
        exponent = exponent_of(tl.load(channel_scale_ptr + start + block, mask=mask, other=1.0).to(tl.float32))
        is_lost = (largest > 5000) | (exponent == 128)
        scale = tl.where(is_lost, float("nan"), power_of_two(largest - exponent))
        tl.store(weight_scale_ptr + start + block, scale, mask=mask)


def _align_fake(x_scale: Tensor, g_scale: Tensor, channel_scale: Tensor, x_is_payload: bool) -> list[Tensor]:
    return [torch.empty_like(each, dtype=torch.float32) for each in (x_scale, g_scale, channel_scale)]


@backend.register_op("fp8_align", fake=_align_fake)
def _align(x_scale: Tensor, g_scale: Tensor, channel_scale: Tensor, x_is_payload: bool) -> list[Tensor]:
    x_factor, g_factor, weight_scale = results = _align_fake(x_scale, g_scale, channel_scale, x_is_payload)
    _align_kernel.launch(
        8,
        x_scale_ptr=x_scale,
        g_scale_ptr=g_scale,
        channel_scale_ptr=channel_scale,
        x_factor_ptr=x_factor,
        g_factor_ptr=g_factor,
        weight_scale_ptr=weight_scale,
        num_rows=x_scale.shape[0],
        num_channels=channel_scale.shape[0],
        X_IS_PAYLOAD=x_is_payload,
        BLOCK_SIZE=4096,
        num_warps=8,
    )
    return results


def align(
    x_scale: Tensor, g_scale: Tensor, channel_scale: Tensor, *, x_is_payload: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What rows of x and g are multiplied by for a sum over them, and the scale of each row of that sum.

    Args:
        x_scale, g_scale: ``[num_rows]``.
        channel_scale: ``[num_channels]``, by which the channels of g were multiplied, and the sum must be divided.
        x_is_payload: Whether x's factors multiply its payload; else they multiply x itself.

    Returns:
        The factors of x's rows and of the payload of g's, and the scales of the sum, NaN if a row was not finite.
    """
    if backend.use_triton(x_scale):
        x_factor, g_factor, weight_scale = _align(x_scale, g_scale, channel_scale, x_is_payload)
        return x_factor, g_factor, weight_scale
    x_exponent, g_exponent = (torch.frexp(scale.nan_to_num(1.0)).exponent - 1 for scale in (x_scale, g_scale))
    common = x_exponent + g_exponent
    largest = common.max()
    shift = common - largest
    x_shift = shift >> 1
    ones = torch.ones_like(x_scale)
    x_factor = torch.ldexp(ones, x_shift if x_is_payload else x_shift - x_exponent)
    channel_exponent = torch.frexp(channel_scale.float()).exponent - 1
    weight_scale = torch.ldexp(torch.ones_like(channel_scale, dtype=torch.float32), largest - channel_exponent)
    is_lost = (x_scale.isnan() | g_scale.isnan()).any()
    weight_scale = weight_scale.masked_fill(is_lost | channel_scale.isnan(), torch.nan)
    return x_factor, torch.ldexp(ones, shift - x_shift), weight_scale


@backend.Kernel
def _transpose_kernel(
    source_ptr,  # [num_rows, num_columns]
    factor_ptr,  # [num_rows]
    target_ptr,  # [num_columns, padded_rows]
    source_row_stride,
    target_row_stride,
    num_rows,
    padded_rows,
    num_columns,
    INVERSE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program writes BLOCK_ROWS x BLOCK_COLUMNS of the source transposed, the next one what follows in memory."""
    row_blocks = (padded_rows - 1) // BLOCK_ROWS + 1
    rows = tl.program_id(0) % row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(0) // row_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    x = tl.load(source_ptr + rows.to(tl.int64)[:, None] * source_row_stride + columns[None, :], mask=mask, other=0.0)
    factor = tl.load(factor_ptr + rows, mask=rows < num_rows, other=1.0)
    if INVERSE:
        factor = power_of_two(-exponent_of(factor.to(tl.float32)))
    x = to_e4m3(x.to(tl.float32) * factor[:, None], INTERPRETED)
    target_mask = (columns < num_columns)[:, None] & (rows < padded_rows)[None, :]
    target_ptrs = target_ptr + columns.to(tl.int64)[:, None] * target_row_stride + rows[None, :]
    tl.store(target_ptrs, tl.trans(x), mask=target_mask)


@backend.register_op("fp8_transpose_", fake=lambda *args: None, mutates=["target"])
def _transpose(source: Tensor, factor: Tensor, inverse: bool, target: Tensor) -> None:
    num_rows, num_columns = source.shape
    padded_rows = target.shape[1]
    block_rows, block_columns = 128, 128
    _transpose_kernel.launch(
        -(-padded_rows // block_rows) * -(-num_columns // block_columns),
        source_ptr=source,
        factor_ptr=factor,
        target_ptr=target,
        source_row_stride=source.stride(0),
        target_row_stride=target.stride(0),
        num_rows=num_rows,
        padded_rows=padded_rows,
        num_columns=num_columns,
        INVERSE=inverse,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        INTERPRETED=is_interpreted(source),
        num_warps=4,
    )


def transpose(source: Tensor, factor: Tensor, *, inverse: bool = False, target: Tensor | None = None) -> Tensor:
    """``source`` times a power of two a row, transposed, in e4m3.

    Args:
        source: ``[num_rows, num_columns]``, floating-point or a payload.
        factor: ``[num_rows]``, float32 powers of two.
        inverse: Whether to divide by ``factor``, which may then be the scales of rows.
        target: Where to write; by default new memory with as many columns as ``TOKEN_MULTIPLE`` asks for.

    Returns:
        ``[num_columns, num_rows]``, with columns of zeros after them.
    """
    num_rows, num_columns = source.shape
    if target is None:
        padded_rows = num_rows + -num_rows % TOKEN_MULTIPLE
        target = source.new_empty((num_columns, padded_rows), dtype=E4M3)
    if not backend.runs_on_triton(factor, source):
        factor = factor.nan_to_num(1.0)[:, None]
        x = source.float() / factor if inverse else source.float() * factor
        target[:, num_rows:] = 0.0
        target[:, :num_rows] = x.clamp(-448.0, 448.0).to(E4M3).t()
        return target
    rows = source if source.stride(1) == 1 else source.contiguous()
    _transpose(rows, factor, inverse, target)
    return target
