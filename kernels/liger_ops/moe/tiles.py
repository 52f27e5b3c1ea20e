"""Tiles of products of experts: their sizes, the tile of a program, and its products."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.moe.index import MIN_TILE_ROWS, Index


class Blocks(NamedTuple):
    """Tile of a product: output rows and columns, terms of a sum at a time, warps, and loads ahead."""

    rows: int
    columns: int
    terms: int
    num_warps: int
    num_stages: int


def fit(blocks: Blocks, itemsize: int, shared_bytes: int, num_products: int = 1) -> Blocks:
    """Blocks of which shared memory holds the loads ahead: of fewer terms, fewer loads, fewer columns, in this order.

    A program computes ``num_products`` products of the same rows.
    """
    rows, columns, terms, num_warps, num_stages = blocks
    while num_stages * (rows + num_products * columns) * terms * itemsize > shared_bytes:
        if terms > 32:
            terms //= 2
        elif num_stages > 2:
            num_stages -= 1
        else:
            columns //= 2
    return Blocks(rows, columns, terms, num_warps, num_stages)


@backend.launch_cache
def choose_blocks(
    num_columns: int,
    num_terms: int,
    dtype: torch.dtype,
    rows: int,
    shared_bytes: int,
    max_columns: int = 256,
    num_products: int = 1,
) -> Blocks:
    """For outputs of ``num_columns`` columns; sizes and loads ahead are those that were fastest on an H200."""
    half = dtype.itemsize == 2
    columns = min(max(16, backend.next_power_of_2(num_columns)), max_columns if half else 64)
    terms = min(max(16, backend.next_power_of_2(num_terms)), 64 if half else 32)
    num_warps = 8 if rows > 64 and columns > 64 else 4
    is_narrow = columns <= 128 and (num_products == 1 or num_terms <= 2048)
    num_stages = 2 if not half else 4 if rows <= 64 or is_narrow else 3
    return fit(Blocks(rows, columns, terms, num_warps, num_stages), dtype.itemsize, shared_bytes, num_products)


@backend.launch_cache
def choose_gradient_blocks(
    num_outputs: int, num_inputs: int, dtype: torch.dtype, left_gathered: bool, shared_bytes: int
) -> Blocks:
    """For gradients of weights, whose rows are output features and columns input features.

    Of gathered rows fewer features are loaded: a thread then has fewer addresses to compute.
    """
    half = dtype.itemsize == 2
    widest = (128, 256) if left_gathered else (256, 128)
    rows, columns = (
        min(max(16, backend.next_power_of_2(size)), most if half else 64)
        for size, most in zip((num_outputs, num_inputs), widest, strict=True)
    )
    num_warps = 8 if rows * columns > 128 * 128 else 4
    return fit(Blocks(rows, columns, 64 if half else 32, num_warps, 3 if half else 2), dtype.itemsize, shared_bytes)


@backend.launch_cache
def choose_rows(num_pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """Rows of a tile: fewer where experts have few, so that padding stays small."""
    average = num_pairs // num_experts
    largest = 128 if dtype.itemsize == 2 else 64
    smallest = 64 if average >= 24 else MIN_TILE_ROWS  # Hopper's tensor cores take 64
    return min(largest, max(smallest, backend.next_power_of_2(average // 4 + 1)))


def precision_of(dtype: torch.dtype) -> str:
    """Of float32 products: as PyTorch's own."""
    return "ieee" if dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest" else "tf32"


def arguments_of(
    left: Tensor,
    weight: Tensor,
    index: Index,
    block_rows: int,
    low: Tensor | None,
    low_weight: Tensor | None,
    num_columns: int,
    max_columns: int = 256,
    num_products: int = 1,
) -> dict[str, Any]:
    """What kernels take that multiply tiles of rows of ``left`` with ``weight``, ``[num_experts, columns, terms]``.

    Their sums begin with the product of ``low``, ``[num_pairs, rank]``, with ``low_weight``, ``[num_experts, columns,
    rank]``, if there is one. Other arguments are those of :func:`choose_blocks`.
    """
    num_terms, shared_bytes = weight.shape[2], backend.hardware(left.device).ahead_bytes
    blocks = choose_blocks(num_columns, num_terms, left.dtype, block_rows, shared_bytes, max_columns, num_products)
    low_sizes = (1, 1, 1, 1) if low_weight is None else (low_weight.shape[2], *low_weight.stride())
    return {
        "weight_ptr": weight,
        "low_ptr": low,
        "low_weight_ptr": low_weight,
        "offsets_ptr": index.offsets,
        "tile_starts_ptr": index.tile_starts,
        "tile_experts_ptr": index.tile_experts,
        "num_experts": weight.shape[0],
        "num_blocks": -(-num_columns // blocks.columns),
        "strides": (left.stride(0), *weight.stride()),
        "low_sizes": low_sizes,
        "BLOCK_ROWS": blocks.rows,
        "BLOCK_COLUMNS": blocks.columns,
        "BLOCK_TERMS": blocks.terms,
        "EVEN": num_columns % blocks.columns == 0 and num_terms % blocks.terms == 0,
        "LOW_TERMS": min(max(16, backend.next_power_of_2(low_sizes[0])), 32),
        "NUM_STAGES": blocks.num_stages,
        "PRECISION": precision_of(left.dtype),
        "num_warps": blocks.num_warps,
    }


@triton.jit
def find_tile(offsets_ptr, tile_starts_ptr, tile_experts_ptr, num_experts, num_blocks, BLOCK_ROWS: tl.constexpr):
    """The expert, first row, end of the expert's rows and block of columns of this program; the expert is -1 if none.

    Programs of one expert and block of columns are neighbors, so that they read one tile of its weight.
    """
    program = tl.program_id(0)
    expert = -1
    row = 0
    end = 0
    block = 0
    if program < tl.load(tile_starts_ptr + num_experts) * num_blocks:
        expert = tl.load(tile_experts_ptr + program // num_blocks)
        first = tl.load(tile_starts_ptr + expert)
        num_tiles = tl.load(tile_starts_ptr + expert + 1) - first
        place = program - first * num_blocks
        block = place // num_tiles
        row = tl.load(offsets_ptr + expert) + place % num_tiles * BLOCK_ROWS
        end = tl.load(offsets_ptr + expert + 1)
    return expert, row, end, block


@triton.jit
def multiply(
    total,  # [BLOCK_ROWS, BLOCK_COLUMNS], what is added to
    up,  # the same of a second weight, or None
    row_ptrs,  # [BLOCK_ROWS], addresses of rows, which are read once for both
    weight_ptr,  # of the expert
    up_offset,  # elements from this weight to the second
    columns,
    num_columns,
    num_terms,
    column_stride,
    term_stride,
    BLOCK_TERMS: tl.constexpr,
    EVEN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``total + rows @ weight.T`` in float32, and if there is a second weight also ``up + rows @ up_weight.T``."""
    terms = tl.arange(0, BLOCK_TERMS)
    places = columns[None, :] * column_stride + terms[:, None] * term_stride
    up_ptr = weight_ptr + up_offset
    for start in tl.range(0, num_terms, BLOCK_TERMS, num_stages=NUM_STAGES):
        left_ptrs = row_ptrs[:, None] + (start + terms)[None, :]
        inside = start + terms < num_terms
        mask = inside[:, None] & (columns < num_columns)[None, :]
        left = tl.load(left_ptrs) if EVEN else tl.load(left_ptrs, mask=inside[None, :], other=0.0)
        right = tl.load(weight_ptr + places) if EVEN else tl.load(weight_ptr + places, mask=mask, other=0.0)
        if up is not None:
            up_right = tl.load(up_ptr + places) if EVEN else tl.load(up_ptr + places, mask=mask, other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        weight_ptr += BLOCK_TERMS * term_stride
        if up is not None:
            up = tl.dot(left, up_right, up, input_precision=PRECISION)
            up_ptr += BLOCK_TERMS * term_stride
    if up is None:
        return total
    else:
        return total, up


@triton.jit
def multiply_low(
    low_ptr, low_weight_ptr, expert, rows, end, columns, num_columns, sizes, TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What the sums of a tile begin with: the product of ``low``, or 0; see :func:`arguments_of`."""
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    if low_ptr is not None:
        rank, expert_stride, column_stride, term_stride = sizes
        row_ptrs = low_ptr + tl.minimum(rows, end - 1).to(tl.int64) * rank
        weight_ptr = low_weight_ptr + expert.to(tl.int64) * expert_stride
        total = multiply(
            total, None, row_ptrs, weight_ptr, 0, columns, num_columns, rank, column_stride, term_stride, TERMS, False,
            1, PRECISION,
        )  # fmt: skip
    return total


@triton.jit
def split_pairs(pairs, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Even and odd columns of ``[BLOCK_ROWS, 2 * BLOCK_COLUMNS]``."""
    return tl.split(tl.reshape(pairs, (BLOCK_ROWS, BLOCK_COLUMNS, 2)))


@triton.jit
def halve(tile, BLOCK_ROWS: tl.constexpr):
    """The first and the second half of the columns."""
    HALF: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_ROWS, 2, HALF)), (0, 2, 1)))
