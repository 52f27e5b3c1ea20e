"""Rows in float8: a payload in e4m3 and one power of two a row, the scale that multiplies it back.

With a the largest absolute value of a row, its scale is the least 2**e with a / 2**e <= 448, e4m3's largest value, and
e >= -108, so that a row of zeros has one too. Scaling is exact, so a payload differs from the row by one rounding. NaN
stays NaN. A row that holds an infinity has the scale NaN: conversions saturate, so its payload would hide it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend

E4M3 = torch.float8_e4m3fn
_LEAST_AMAX = 2.0**-100
_HELD_COLUMNS = 16384  # what registers hold; longer rows are read twice
_LOOP_COLUMNS = 4096


def quantize_rows_reference(x: Tensor, channel_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Payload and scales of rows in plain PyTorch; see :func:`quantize_rows`."""
    wide = x.float() if channel_scale is None else x.float() * channel_scale
    amax = wide.abs().where(~wide.isnan(), 0.0).amax(dim=1)
    bits = amax.clamp(min=_LEAST_AMAX).view(torch.int32)
    scale = (((bits + 0x1FFFFF) >> 23) - 8 << 23).view(torch.float32).where(amax.isfinite(), torch.nan)
    # The payload of a row with an infinity is of no use.
    return (wide / scale.nan_to_num(1.0)[:, None]).clamp(-448.0, 448.0).to(E4M3), scale


@triton.jit
def to_e4m3(x, INTERPRETED: tl.constexpr):
    """``x`` in float8, rounded to the nearest, ties to even, which Triton's interpreter does not do."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
        subnormal = (tl.abs(x) + 24576.0) - 24576.0  # to multiples of 2**-9
        subnormal = (subnormal.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)
        rounded = tl.where(tl.abs(x) < 0.015625, subnormal, normal).to(tl.float8e4nv).to(tl.int8, bitcast=True)
        return tl.where(x == x, rounded, 127).to(tl.int8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def power_of_two(exponent):
    """2**exponent in float32: 0 below float32's normal range, infinity above."""
    return tl.where(exponent < -126, 0, (tl.minimum(exponent, 128) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(scale):
    """The exponent of a power of two; 128 of NaN."""
    return (scale.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def row_scale(amax):
    """The scale of a row whose largest absolute value is ``amax``, NaN if that is infinite, and its inverse."""
    bits = tl.maximum(amax, 7.888609052210118e-31).to(tl.int32, bitcast=True)
    exponent = ((bits + 0x1FFFFF) >> 23) - 135
    scale = tl.where(amax < float("inf"), power_of_two(exponent), float("nan"))
    return scale, power_of_two(-exponent)


@triton.jit
def _load(ptr, columns, num_columns, channel_scale_ptr, first_channel):
    x = tl.load(ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    if channel_scale_ptr is not None:
        scales = tl.load(channel_scale_ptr + first_channel + columns, mask=columns < num_columns, other=0.0)
        x *= scales.to(tl.float32)
    return x


@triton.jit
def _store(ptr, x, inverse, columns, num_columns, INTERPRETED: tl.constexpr):
    tl.store(ptr + columns, to_e4m3(x * inverse, INTERPRETED), mask=columns < num_columns)


@backend.Kernel
def _quantize_rows_kernel(
    first_ptr,  # [num_rows, first_columns]
    second_ptr,  # further columns of the rows, or None
    third_ptr,
    channel_scale_ptr,  # [columns of all] or None
    payload_ptr,  # [num_rows, columns of all]
    scale_ptr,  # [num_rows]
    row_strides,  # of the three parts
    payload_row_stride,
    columns,  # of the three parts
    FIRST_BLOCK: tl.constexpr,
    SECOND_BLOCK: tl.constexpr,
    THIRD_BLOCK: tl.constexpr,
    HOLDS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program quantizes a row: held in registers, or, of the first part alone, read twice."""
    first_row_stride, second_row_stride, third_row_stride = row_strides
    first_columns, second_columns, third_columns = columns
    row = tl.program_id(0).to(tl.int64)
    payload_ptr += row * payload_row_stride
    first_ptr += row * first_row_stride
    if HOLDS:
        first_range = tl.arange(0, FIRST_BLOCK)
        first = _load(first_ptr, first_range, first_columns, channel_scale_ptr, 0)
        amax = tl.max(tl.abs(first))
        if second_ptr is not None:
            second_range = tl.arange(0, SECOND_BLOCK)
            second_ptr += row * second_row_stride
            second = _load(second_ptr, second_range, second_columns, channel_scale_ptr, first_columns)
            amax = tl.maximum(amax, tl.max(tl.abs(second)))
        if third_ptr is not None:
            third_range = tl.arange(0, THIRD_BLOCK)
            third_ptr += row * third_row_stride
            offset = first_columns + second_columns
            third = _load(third_ptr, third_range, third_columns, channel_scale_ptr, offset)
            amax = tl.maximum(amax, tl.max(tl.abs(third)))
        scale, inverse = row_scale(amax)
        _store(payload_ptr, first, inverse, first_range, first_columns, INTERPRETED)
        if second_ptr is not None:
            _store(payload_ptr + first_columns, second, inverse, second_range, second_columns, INTERPRETED)
        if third_ptr is not None:
            offset = first_columns + second_columns
            _store(payload_ptr + offset, third, inverse, third_range, third_columns, INTERPRETED)
    else:
        block = tl.arange(0, FIRST_BLOCK)
        largest = tl.zeros([FIRST_BLOCK], dtype=tl.float32)
        for start in range(0, first_columns, FIRST_BLOCK):
            largest = tl.maximum(largest, tl.abs(_load(first_ptr, start + block, first_columns, channel_scale_ptr, 0)))
        scale, inverse = row_scale(tl.max(largest))
        for start in range(0, first_columns, FIRST_BLOCK):
            x = _load(first_ptr, start + block, first_columns, channel_scale_ptr, 0)
            _store(payload_ptr, x, inverse, start + block, first_columns, INTERPRETED)
    tl.store(scale_ptr + row, scale)


def num_warps_for(block_size: int) -> int:
    """Warps for programs that hold so many columns of a row, a power of two: 16 elements a thread."""
    return max(1, min(16, block_size // 512))


def is_interpreted(tensor: Tensor) -> bool:
    """Whether kernels on ``tensor`` run under Triton's interpreter."""
    return not tensor.is_cuda


@backend.register_op("fp8_quantize_rows_", fake=lambda *args: None, mutates=["payload", "scale"])
def _quantize_rows(
    first: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    channel_scale: Tensor | None,
    payload: Tensor,
    scale: Tensor,
) -> None:
    parts = [first, second, third]
    columns = [0 if part is None else part.shape[1] for part in parts]
    blocks = [backend.next_power_of_2(each) for each in columns]
    holds = sum(blocks) <= _HELD_COLUMNS
    if not holds:
        blocks = [_LOOP_COLUMNS, 1, 1]
    _quantize_rows_kernel.launch(
        payload.shape[0],
        first_ptr=first,
        second_ptr=second,
        third_ptr=third,
        channel_scale_ptr=channel_scale,
        payload_ptr=payload,
        scale_ptr=scale,
        row_strides=tuple(0 if part is None else part.stride(0) for part in parts),
        payload_row_stride=payload.stride(0),
        columns=tuple(columns),
        FIRST_BLOCK=blocks[0],
        SECOND_BLOCK=blocks[1],
        THIRD_BLOCK=blocks[2],
        HOLDS=holds,
        INTERPRETED=is_interpreted(first),
        num_warps=num_warps_for(max(blocks)),
    )


def quantize_rows(
    parts: Tensor | list[Tensor],
    channel_scale: Tensor | None = None,
    payload: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows in float8.

    Args:
        parts: ``[num_rows, num_columns]``, or several such tensors, side by side.
        channel_scale: ``[num_columns]`` of all parts: multiplies the columns first, exactly if these are powers of two.
        payload, scale: Where to write the results, by default new memory.

    Returns:
        The payload in e4m3, ``[num_rows, num_columns]``, and the scales, float32, ``[num_rows]``.
    """
    parts = [parts] if isinstance(parts, Tensor) else parts
    first, num_columns = parts[0], sum(part.shape[1] for part in parts)
    payload = first.new_empty((first.shape[0], num_columns), dtype=E4M3) if payload is None else payload
    scale = first.new_empty(first.shape[0], dtype=torch.float32) if scale is None else scale
    if first.shape[0] == 0:
        return payload, scale
    if not backend.runs_on_triton(*parts):
        found = quantize_rows_reference(torch.cat(parts, dim=1), channel_scale)
        payload.copy_(found[0])
        scale.copy_(found[1])
        return payload, scale
    columns = [backend.next_power_of_2(part.shape[1]) for part in parts]
    if len(parts) > 3 or (len(parts) > 1 and sum(columns) > _HELD_COLUMNS):
        parts = [torch.cat(parts, dim=1)]
    rows = [backend.as_rows(part, part.shape[1]) for part in parts]
    _quantize_rows(*rows, *[None] * (3 - len(rows)), channel_scale, payload, scale)
    return payload, scale


_ones: dict[tuple[int, torch.device], Tensor] = {}


def ones(size: int, device: torch.device) -> Tensor:
    """``[size]`` ones in float32, which nobody may write to."""
    if device.type == "meta":
        return torch.ones(size, dtype=torch.float32, device=device)
    if (size, device) not in _ones:
        _ones[size, device] = torch.ones(size, dtype=torch.float32, device=device)
    return _ones[size, device]
