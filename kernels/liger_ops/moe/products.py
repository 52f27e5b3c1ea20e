"""Matrix products of experts: each tile of rows, which all belong to one expert, with that expert's weight.

Rows of tokens are gathered where they are loaded, so nothing is permuted in memory. Rows beyond an expert's last one
are computed and not stored; they never mix with others, except in gradients of weights, where they are masked.
Weights come with the strides of their dimensions ``(expert, output feature, input feature)``, in any layout.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.moe.gate import Gate, gate_values
from liger_ops.moe.index import MIN_TILE_ROWS, Index


class Blocks(NamedTuple):
    """Tile of a product: output rows and columns, terms of a sum at a time, warps, and loads ahead."""

    rows: int
    columns: int
    terms: int
    num_warps: int
    num_stages: int


@backend.launch_cache
def choose_blocks(num_columns: int, num_terms: int, dtype: torch.dtype, rows: int, wide: bool) -> Blocks:
    """For outputs of ``num_columns`` columns; ``wide`` if a program has one accumulator of up to 256 columns."""
    columns = min(max(16, backend.next_power_of_2(num_columns)), 256 if wide else 128)
    half = dtype.itemsize == 2
    terms = min(max(16, backend.next_power_of_2(num_terms)), 64 if half else 32)
    if not half:
        columns = min(columns, 64)
    num_warps = 8 if rows * columns * (1 if wide else 2) > 128 * 128 else 4
    return Blocks(rows, columns, terms, num_warps, 3 if half else 2)


@backend.launch_cache
def choose_rows(num_pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """Rows of a tile: fewer where experts have few, so that padding stays small."""
    average = num_pairs // num_experts
    largest = 128 if dtype.itemsize == 2 else 64
    smallest = 64 if average >= 24 else MIN_TILE_ROWS  # Hopper's tensor cores take 64
    return min(largest, max(smallest, backend.next_power_of_2(average // 2 + 1)))


@triton.jit
def _tile(offsets_ptr, tile_starts_ptr, tile_experts_ptr, num_experts, num_blocks, BLOCK_ROWS: tl.constexpr):
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
def _multiply(
    row_ptrs,  # [BLOCK_ROWS], addresses of rows
    weight_ptr,  # of the expert
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
    """``rows @ weight.T`` in float32."""
    terms = tl.arange(0, BLOCK_TERMS)
    places = columns[None, :] * column_stride + terms[:, None] * term_stride
    total = tl.zeros((row_ptrs.shape[0], columns.shape[0]), tl.float32)
    for start in tl.range(0, num_terms, BLOCK_TERMS, num_stages=NUM_STAGES):
        left_ptrs = row_ptrs[:, None] + (start + terms)[None, :]
        if EVEN:
            left = tl.load(left_ptrs)
            right = tl.load(weight_ptr + places)
        else:
            inside = start + terms < num_terms
            left = tl.load(left_ptrs, mask=inside[None, :], other=0.0)
            mask = inside[:, None] & (columns < num_columns)[None, :]
            right = tl.load(weight_ptr + places, mask=mask, other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        weight_ptr += BLOCK_TERMS * term_stride
    return total


@triton.jit
def _multiply_both(
    row_ptrs, weight_ptr, up_offset, columns, num_columns, num_terms, column_stride, term_stride,
    BLOCK_TERMS: tl.constexpr, EVEN: tl.constexpr, NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same by gate and up, whose weight begins ``up_offset`` elements after the gate's; rows are read once."""
    terms = tl.arange(0, BLOCK_TERMS)
    places = columns[None, :] * column_stride + terms[:, None] * term_stride
    up_ptr = weight_ptr + up_offset
    gate = tl.zeros((row_ptrs.shape[0], columns.shape[0]), tl.float32)
    up = tl.zeros((row_ptrs.shape[0], columns.shape[0]), tl.float32)
    for start in tl.range(0, num_terms, BLOCK_TERMS, num_stages=NUM_STAGES):
        left_ptrs = row_ptrs[:, None] + (start + terms)[None, :]
        if EVEN:
            left = tl.load(left_ptrs)
            gate_weight = tl.load(weight_ptr + places)
            up_weight = tl.load(up_ptr + places)
        else:
            inside = start + terms < num_terms
            mask = inside[:, None] & (columns < num_columns)[None, :]
            left = tl.load(left_ptrs, mask=inside[None, :], other=0.0)
            gate_weight = tl.load(weight_ptr + places, mask=mask, other=0.0)
            up_weight = tl.load(up_ptr + places, mask=mask, other=0.0)
        gate = tl.dot(left, gate_weight, gate, input_precision=PRECISION)
        up = tl.dot(left, up_weight, up, input_precision=PRECISION)
        weight_ptr += BLOCK_TERMS * term_stride
        up_ptr += BLOCK_TERMS * term_stride
    return gate, up


@triton.jit
def _split(pairs, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Even and odd columns of ``[BLOCK_ROWS, 2 * BLOCK_COLUMNS]``."""
    return tl.split(tl.reshape(pairs, (BLOCK_ROWS, BLOCK_COLUMNS, 2)))


@backend.Kernel
def _gate_up_kernel(
    x_ptr,  # [num_tokens, hidden_size]
    weight_ptr,  # [num_experts, width or 2 * width, hidden_size]
    bias_ptr,  # [num_experts, width or 2 * width] or None
    z_ptr,  # [num_pairs, width or 2 * width] in the order of the weight, or None
    a_ptr,  # [num_pairs, width]
    pair_ptr,  # pair of each row
    offsets_ptr,
    tile_starts_ptr,
    tile_experts_ptr,
    top_k,
    num_experts,
    num_blocks,
    width,
    hidden_size,
    row_stride,
    expert_stride,
    output_stride,
    input_stride,
    limit,
    alpha,
    up_offset,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,  # 0 without up, 1 with up after all of the gate, 2 with up in odd columns
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,  # of a
    BLOCK_TERMS: tl.constexpr,
    EVEN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes BLOCK_COLUMNS columns of a tile of rows: products with gate and up, and a of them."""
    expert, first_row, end, block = _tile(
        offsets_ptr, tile_starts_ptr, tile_experts_ptr, num_experts, num_blocks, BLOCK_ROWS
    )
    if expert < 0:
        return
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    inside = rows < end
    tokens = (tl.load(pair_ptr + rows, mask=inside, other=0) // top_k).to(tl.int64)
    row_ptrs = x_ptr + tokens * row_stride
    columns = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = inside[:, None] & (columns < width)[None, :]
    weight = weight_ptr + expert.to(tl.int64) * expert_stride
    HALF: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    z_width = width
    if GATED > 0:
        z_width = 2 * width
    bias = bias_ptr
    if bias_ptr is not None:
        bias += expert.to(tl.int64) * z_width
    long_rows = rows.to(tl.int64)
    if GATED == 1:
        gate, up = _multiply_both(
            row_ptrs, weight, width * output_stride, columns, width, hidden_size, output_stride, input_stride,
            BLOCK_TERMS, EVEN, NUM_STAGES, PRECISION,
        )  # fmt: skip
        if bias_ptr is not None:
            gate += tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + width + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
        a, _, _ = gate_values(gate, up, limit, alpha, up_offset, ACTIVATION, LIMIT, HALF)
        if z_ptr is not None:
            z_ptrs = z_ptr + long_rows[:, None] * z_width + columns[None, :]
            tl.store(z_ptrs, gate.to(z_ptr.dtype.element_ty), mask=mask)
            tl.store(z_ptrs + width, up.to(z_ptr.dtype.element_ty), mask=mask)
    else:
        PARTS: tl.constexpr = 2 if GATED == 2 else 1
        all_columns = block * BLOCK_COLUMNS * PARTS + tl.arange(0, BLOCK_COLUMNS * PARTS)
        z = _multiply(
            row_ptrs, weight, all_columns, z_width, hidden_size, output_stride, input_stride,
            BLOCK_TERMS, EVEN, NUM_STAGES, PRECISION,
        )  # fmt: skip
        if bias_ptr is not None:
            z += tl.load(bias + all_columns, mask=all_columns < z_width, other=0.0).to(tl.float32)[None, :]
        if GATED == 2:
            gate, up = _split(z, BLOCK_ROWS, BLOCK_COLUMNS)
            a, _, _ = gate_values(gate, up, limit, alpha, up_offset, ACTIVATION, LIMIT, HALF)
        else:
            a, _, _ = gate_values(z, None, limit, alpha, up_offset, ACTIVATION, LIMIT, HALF)
        if z_ptr is not None:
            z_ptrs = z_ptr + long_rows[:, None] * z_width + all_columns[None, :]
            z_mask = inside[:, None] & (all_columns < z_width)[None, :]
            tl.store(z_ptrs, z.to(z_ptr.dtype.element_ty), mask=z_mask)
    tl.store(a_ptr + long_rows[:, None] * width + columns[None, :], a.to(a_ptr.dtype.element_ty), mask=mask)


@backend.Kernel
def _product_kernel(
    left_ptr,  # [num_pairs, num_terms], contiguous
    weight_ptr,  # [num_experts, num_columns, num_terms]
    bias_ptr,  # [num_experts, num_columns] or None
    y_ptr,  # [num_pairs, num_columns]
    offsets_ptr,
    tile_starts_ptr,
    tile_experts_ptr,
    num_experts,
    num_blocks,
    num_columns,
    num_terms,
    expert_stride,
    column_stride,
    term_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_TERMS: tl.constexpr,
    EVEN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program multiplies a tile of rows with BLOCK_COLUMNS output features of its expert."""
    expert, first_row, end, block = _tile(
        offsets_ptr, tile_starts_ptr, tile_experts_ptr, num_experts, num_blocks, BLOCK_ROWS
    )
    if expert < 0:
        return
    rows = (first_row + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    columns = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row_ptrs = left_ptr + tl.minimum(rows, end - 1) * num_terms
    y = _multiply(
        row_ptrs, weight_ptr + expert.to(tl.int64) * expert_stride, columns, num_columns, num_terms,
        column_stride, term_stride, BLOCK_TERMS, EVEN, NUM_STAGES, PRECISION,
    )  # fmt: skip
    if bias_ptr is not None:
        bias = bias_ptr + expert.to(tl.int64) * num_columns + columns
        y += tl.load(bias, mask=columns < num_columns, other=0.0).to(tl.float32)[None, :]
    mask = (rows < end)[:, None] & (columns < num_columns)[None, :]
    tl.store(y_ptr + rows[:, None] * num_columns + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _halve(tile, BLOCK_ROWS: tl.constexpr):
    """The first and the second half of the columns."""
    HALF: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_ROWS, 2, HALF)), (0, 2, 1)))


@triton.jit
def _gate_gradients(
    grad_a, first_column, rows, inside, scores, z_ptr, grad_z_ptr, scaled_ptr, width, limit, alpha, up_offset,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Stores what a tile of the gradient of a, without scores, gives; returns its part of the scores' gradients."""
    BLOCK_ROWS: tl.constexpr = grad_a.shape[0]
    BLOCK_COLUMNS: tl.constexpr = grad_a.shape[1]
    HALF: tl.constexpr = z_ptr.dtype.element_ty != tl.float32
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    long_rows = rows.to(tl.int64)
    mask = inside[:, None] & (columns < width)[None, :]
    if GATED == 2:
        both = 2 * first_column + tl.arange(0, 2 * BLOCK_COLUMNS)
        places = long_rows[:, None] * 2 * width + both[None, :]
        both_mask = inside[:, None] & (both < 2 * width)[None, :]
        z = tl.load(z_ptr + places, mask=both_mask, other=0.0).to(tl.float32)
        gate, up = _split(z, BLOCK_ROWS, BLOCK_COLUMNS)
        a, slope, by_up = gate_values(gate, up, limit, alpha, up_offset, ACTIVATION, LIMIT, HALF)
    elif GATED == 1:
        places = long_rows[:, None] * 2 * width + columns[None, :]
        gate = tl.load(z_ptr + places, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(z_ptr + places + width, mask=mask, other=0.0).to(tl.float32)
        a, slope, by_up = gate_values(gate, up, limit, alpha, up_offset, ACTIVATION, LIMIT, HALF)
    else:
        places = long_rows[:, None] * width + columns[None, :]
        gate = tl.load(z_ptr + places, mask=mask, other=0.0).to(tl.float32)
        a, slope, by_up = gate_values(gate, None, limit, alpha, up_offset, ACTIVATION, LIMIT, HALF)
    # Columns beyond the last one are 0 in grad_a, but 0 times a value that overflowed would not be.
    part = tl.sum(tl.where(mask, a * grad_a, 0.0), axis=1)
    if scaled_ptr is not None:
        scaled = (a * scores[:, None]).to(scaled_ptr.dtype.element_ty)
        tl.store(scaled_ptr + long_rows[:, None] * width + columns[None, :], scaled, mask=mask)
    if grad_z_ptr is not None:
        grad_a *= scores[:, None]
        grad_gate = (grad_a * slope).to(grad_z_ptr.dtype.element_ty)
        if GATED == 2:
            grad_up = (grad_a * by_up).to(grad_z_ptr.dtype.element_ty)
            grad_z = tl.reshape(tl.join(grad_gate, grad_up), (BLOCK_ROWS, 2 * BLOCK_COLUMNS))
            tl.store(grad_z_ptr + places, grad_z, mask=both_mask)
        else:
            tl.store(grad_z_ptr + places, grad_gate, mask=mask)
            if GATED == 1:
                tl.store(grad_z_ptr + places + width, (grad_a * by_up).to(grad_z_ptr.dtype.element_ty), mask=mask)
    return part


@backend.Kernel
def _gate_backward_kernel(
    grad_ptr,  # [num_tokens, hidden_size], of the output
    weight_ptr,  # [num_experts, hidden_size, width], down
    z_ptr,  # [num_pairs, width or 2 * width]
    scores_ptr,  # [num_pairs], top_k_weights
    grad_z_ptr,  # as z, may be z; or None
    scaled_ptr,  # [num_pairs, width]: a times the score, or None
    partial_ptr,  # [num_pairs, num_blocks] in float32: parts of the scores' gradients
    pair_ptr,
    offsets_ptr,
    tile_starts_ptr,
    tile_experts_ptr,
    top_k,
    num_experts,
    num_blocks,
    width,
    hidden_size,
    row_stride,
    expert_stride,
    column_stride,
    term_stride,
    limit,
    alpha,
    up_offset,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # 1 or 2
    BLOCK_TERMS: tl.constexpr,
    EVEN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes the gradients of z in BLOCK_COLUMNS columns of a tile of rows, and what the scores get."""
    expert, first_row, end, block = _tile(
        offsets_ptr, tile_starts_ptr, tile_experts_ptr, num_experts, num_blocks, BLOCK_ROWS
    )
    if expert < 0:
        return
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    inside = rows < end
    pairs = tl.load(pair_ptr + rows, mask=inside, other=0)
    row_ptrs = grad_ptr + (pairs // top_k).to(tl.int64) * row_stride
    columns = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    grad_a = _multiply(
        row_ptrs, weight_ptr + expert.to(tl.int64) * expert_stride, columns, width, hidden_size,
        column_stride, term_stride, BLOCK_TERMS, EVEN, NUM_STAGES, PRECISION,
    )  # fmt: skip
    scores = tl.load(scores_ptr + pairs, mask=inside, other=0.0).to(tl.float32)
    PART: tl.constexpr = BLOCK_COLUMNS // NUM_PARTS
    part = tl.zeros((BLOCK_ROWS,), tl.float32)
    rest = grad_a
    # Of a part of the columns at a time, which needs fewer registers.
    for number in tl.static_range(NUM_PARTS):
        if number + 1 < NUM_PARTS:
            own, rest = _halve(rest, BLOCK_ROWS)
        else:
            own = rest
        part += _gate_gradients(
            own, block * BLOCK_COLUMNS + number * PART, rows, inside, scores, z_ptr, grad_z_ptr, scaled_ptr,
            width, limit, alpha, up_offset, ACTIVATION, LIMIT, GATED,
        )  # fmt: skip
    tl.store(partial_ptr + rows.to(tl.int64) * num_blocks + block, part, mask=inside)


@backend.Kernel
def _weight_gradient_kernel(
    left_ptr,  # [num_pairs or num_tokens, num_outputs]
    right_ptr,  # [num_pairs or num_tokens, num_inputs]
    grad_ptr,  # [num_experts, num_outputs, num_inputs]
    grad_bias_ptr,  # [num_experts, num_outputs or num_inputs] or None: sums of rows of left or right
    scores_ptr,  # [num_pairs] or None: factors of the rows in these sums
    pair_ptr,
    offsets_ptr,
    top_k,
    num_outputs,
    num_inputs,
    left_stride,
    right_stride,
    num_output_blocks,
    num_input_blocks,
    LEFT_GATHERED: tl.constexpr,  # whether left has the rows of tokens, or else right
    LEFT_BIAS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    BLOCK_TERMS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes a block of the gradient of one expert's weight: 0 if it has no rows."""
    program = tl.program_id(0)
    num_blocks = num_output_blocks * num_input_blocks
    expert = program // num_blocks
    place = program % num_blocks
    outputs = place % num_output_blocks * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inputs = place // num_output_blocks * BLOCK_INPUTS + tl.arange(0, BLOCK_INPUTS)
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    terms = tl.arange(0, BLOCK_TERMS)
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_INPUTS), tl.float32)
    bias = tl.zeros((BLOCK_OUTPUTS if LEFT_BIAS else BLOCK_INPUTS,), tl.float32)
    # A load whose address the same iteration loads is not done ahead of time, so addresses are carried.
    pairs = tl.load(pair_ptr + start + terms, mask=start + terms < end, other=0)
    for begin in tl.range(start, end, BLOCK_TERMS, num_stages=NUM_STAGES):
        rows = begin + terms
        inside = rows < end
        tokens = (pairs // top_k).to(tl.int64)
        if scores_ptr is not None:
            scores = tl.load(scores_ptr + pairs, mask=inside, other=0.0).to(tl.float32)
        pairs = tl.load(pair_ptr + rows + BLOCK_TERMS, mask=rows + BLOCK_TERMS < end, other=0)
        left_rows = tokens if LEFT_GATHERED else rows.to(tl.int64)
        right_rows = rows.to(tl.int64) if LEFT_GATHERED else tokens
        left = tl.load(
            left_ptr + left_rows[:, None] * left_stride + outputs[None, :],
            mask=inside[:, None] & (outputs < num_outputs)[None, :],
            other=0.0,
        )
        right = tl.load(
            right_ptr + right_rows[:, None] * right_stride + inputs[None, :],
            mask=inside[:, None] & (inputs < num_inputs)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
        if grad_bias_ptr is not None:
            wide = left.to(tl.float32) if LEFT_BIAS else right.to(tl.float32)
            if scores_ptr is not None:
                wide *= scores[:, None]
            bias += tl.sum(wide, axis=0)
    long_expert = expert.to(tl.int64)
    mask = (outputs < num_outputs)[:, None] & (inputs < num_inputs)[None, :]
    ptrs = grad_ptr + (long_expert * num_outputs + outputs[:, None]) * num_inputs + inputs[None, :]
    tl.store(ptrs, total.to(grad_ptr.dtype.element_ty), mask=mask)
    if grad_bias_ptr is not None:
        size = num_outputs if LEFT_BIAS else num_inputs
        places = outputs if LEFT_BIAS else inputs
        is_first = (place // num_output_blocks if LEFT_BIAS else place % num_output_blocks) == 0
        ptrs = grad_bias_ptr + long_expert * size + places
        tl.store(ptrs, bias.to(grad_bias_ptr.dtype.element_ty), mask=(places < size) & is_first)


@backend.Kernel
def _combine_kernel(
    rows_ptr,  # [num_pairs, num_columns]
    scores_ptr,  # [num_pairs] or None for 1
    row_ptr,  # row of each pair
    y_ptr,  # [num_tokens, num_columns]
    num_columns,
    num_blocks,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program adds up a block of columns of a token's rows, in float32."""
    program = tl.program_id(0)
    token = (program // num_blocks).to(tl.int64)
    columns = program % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):
        row = tl.load(row_ptr + token * TOP_K + slot).to(tl.int64)
        part = tl.load(rows_ptr + row * num_columns + columns, mask=mask & (row >= 0), other=0.0).to(tl.float32)
        if scores_ptr is not None:
            part *= tl.load(scores_ptr + token * TOP_K + slot).to(tl.float32)
            part = tl.where(row >= 0, part, 0.0)  # whatever the score is
        total += part
    tl.store(y_ptr + token * num_columns + columns, total.to(y_ptr.dtype.element_ty), mask=mask)


@backend.Kernel
def _score_gradient_kernel(
    partial_ptr,  # [num_pairs, num_blocks] of rows, float32
    row_ptr,  # row of each pair
    grad_ptr,  # [num_pairs]
    num_pairs,
    num_blocks,
    BLOCK: tl.constexpr,
):
    """One program adds up the parts of BLOCK pairs; 0 for those without a row."""
    pairs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(row_ptr + pairs, mask=pairs < num_pairs, other=-1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for block in tl.range(0, num_blocks):
        total += tl.load(partial_ptr + rows * num_blocks + block, mask=rows >= 0, other=0.0)
    tl.store(grad_ptr + pairs, total.to(grad_ptr.dtype.element_ty), mask=pairs < num_pairs)


def _precision(dtype: torch.dtype) -> str:
    """Of float32 products: as PyTorch's own."""
    return "ieee" if dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest" else "tf32"


def _tiles(index: Index) -> dict[str, Tensor]:
    return {
        "offsets_ptr": index.offsets,
        "tile_starts_ptr": index.tile_starts,
        "tile_experts_ptr": index.tile_experts,
    }


def _shape(blocks: Blocks, num_columns: int, num_terms: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "num_blocks": -(-num_columns // blocks.columns),
        "BLOCK_ROWS": blocks.rows,
        "BLOCK_COLUMNS": blocks.columns,
        "BLOCK_TERMS": blocks.terms,
        "EVEN": num_columns % blocks.columns == 0 and num_terms % blocks.terms == 0,
        "NUM_STAGES": blocks.num_stages,
        "PRECISION": _precision(dtype),
        "num_warps": blocks.num_warps,
    }


def gate_up(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Index,
    top_k: int,
    block_rows: int,
    gate: Gate,
    gated: int,
    z: Tensor | None,
    a: Tensor,
) -> None:
    """Writes the products with gate and up ``z`` (if not None) and ``a``, the activation's output.

    ``weight`` is a view ``[num_experts, width or 2 * width, hidden_size]`` of any strides. ``gated`` is 0 without up,
    1 with up after the gate, 2 with up in odd features.
    """
    width, hidden_size = a.shape[1], x.shape[1]
    blocks = choose_blocks(width, hidden_size, x.dtype, block_rows, gated == 0)
    shape = _shape(blocks, width, hidden_size, x.dtype)
    _gate_up_kernel.launch(
        index.max_tiles(block_rows) * shape["num_blocks"],
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=bias,
        z_ptr=z,
        a_ptr=a,
        pair_ptr=index.pair_of_row,
        top_k=top_k,
        num_experts=weight.shape[0],
        width=width,
        hidden_size=hidden_size,
        row_stride=x.stride(0),
        expert_stride=weight.stride(0),
        output_stride=weight.stride(1),
        input_stride=weight.stride(2),
        GATED=gated,
        **_tiles(index),
        **gate.constants,
        **shape,
    )


def product(left: Tensor, weight: Tensor, bias: Tensor | None, index: Index, block_rows: int, y: Tensor) -> None:
    """Writes ``left @ weight[expert].T + bias[expert]`` of each row; ``weight`` is a view of any strides."""
    num_columns, num_terms = weight.shape[1:]
    shape = _shape(
        choose_blocks(num_columns, num_terms, left.dtype, block_rows, True), num_columns, num_terms, left.dtype
    )
    _product_kernel.launch(
        index.max_tiles(block_rows) * shape["num_blocks"],
        left_ptr=left,
        weight_ptr=weight,
        bias_ptr=bias,
        y_ptr=y,
        num_experts=weight.shape[0],
        num_columns=num_columns,
        num_terms=num_terms,
        expert_stride=weight.stride(0),
        column_stride=weight.stride(1),
        term_stride=weight.stride(2),
        **_tiles(index),
        **shape,
    )


def gate_backward(
    grad: Tensor,
    weight: Tensor,
    z: Tensor,
    scores: Tensor,
    index: Index,
    block_rows: int,
    gate: Gate,
    gated: int,
    grad_z: Tensor | None,
    scaled: Tensor | None,
    grad_scores: Tensor,
) -> None:
    """Writes the gradients of z, the scaled products of gate and up, and the gradients of scores ``[tokens, top_k]``.

    ``grad`` is the output's ``[num_tokens, hidden_size]``, ``weight`` a view ``[num_experts, width, hidden_size]`` of
    down.
    """
    width, hidden_size = weight.shape[1:]
    blocks = choose_blocks(width, hidden_size, grad.dtype, block_rows, False)
    shape = _shape(blocks, width, hidden_size, grad.dtype)
    partial = grad.new_empty((z.shape[0], shape["num_blocks"]), dtype=torch.float32)
    _gate_backward_kernel.launch(
        index.max_tiles(block_rows) * shape["num_blocks"],
        grad_ptr=grad,
        weight_ptr=weight,
        z_ptr=z,
        scores_ptr=scores,
        grad_z_ptr=grad_z,
        scaled_ptr=scaled,
        partial_ptr=partial,
        pair_ptr=index.pair_of_row,
        top_k=scores.shape[1],
        num_experts=weight.shape[0],
        width=width,
        hidden_size=hidden_size,
        row_stride=grad.stride(0),
        expert_stride=weight.stride(0),
        column_stride=weight.stride(1),
        term_stride=weight.stride(2),
        GATED=gated,
        NUM_PARTS=2 if blocks.columns >= 64 else 1,
        **_tiles(index),
        **gate.constants,
        **shape,
    )
    _score_gradient_kernel.launch(
        -(-scores.numel() // 256),
        partial_ptr=partial,
        row_ptr=index.row_of_pair,
        grad_ptr=grad_scores,
        num_pairs=scores.numel(),
        num_blocks=shape["num_blocks"],
        BLOCK=256,
        num_warps=4,
    )


def weight_gradient(
    left: Tensor,
    right: Tensor,
    index: Index,
    top_k: int,
    left_gathered: bool,
    grad: Tensor,
    grad_bias: Tensor | None,
    scores: Tensor | None,
) -> None:
    """Writes ``left.T @ right`` over the rows of each expert, one of which has the rows of tokens.

    ``grad`` is ``[num_experts, columns of left, columns of right]``, ``grad_bias`` the sums of the rows of the one
    whose columns it has, times scores.
    """
    num_experts, num_outputs, num_inputs = grad.shape
    half = left.dtype.itemsize == 2
    block_outputs = min(max(16, backend.next_power_of_2(num_outputs)), 128 if half else 64)
    block_inputs = min(max(16, backend.next_power_of_2(num_inputs)), 256 if half else 64)
    num_output_blocks, num_input_blocks = -(-num_outputs // block_outputs), -(-num_inputs // block_inputs)
    # Rows of tokens are those of x or of the output's gradient; a bias belongs to what is not x.
    left_bias = left_gathered == (scores is not None)
    _weight_gradient_kernel.launch(
        num_experts * num_output_blocks * num_input_blocks,
        left_ptr=left,
        right_ptr=right,
        grad_ptr=grad,
        grad_bias_ptr=grad_bias,
        scores_ptr=None if grad_bias is None else scores,
        pair_ptr=index.pair_of_row,
        offsets_ptr=index.offsets,
        top_k=top_k,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        left_stride=left.stride(0),
        right_stride=right.stride(0),
        num_output_blocks=num_output_blocks,
        num_input_blocks=num_input_blocks,
        LEFT_GATHERED=left_gathered,
        LEFT_BIAS=left_bias,
        BLOCK_OUTPUTS=block_outputs,
        BLOCK_INPUTS=block_inputs,
        BLOCK_TERMS=64 if half else 32,
        NUM_STAGES=3 if half else 2,
        PRECISION=_precision(left.dtype),
        num_warps=8 if block_outputs * block_inputs > 128 * 128 else 4,
    )


def combine(rows: Tensor, scores: Tensor | None, index: Index, top_k: int, y: Tensor) -> None:
    """Writes the sums of each token's rows, times scores ``[num_pairs]`` if they are not None."""
    num_columns = rows.shape[1]
    block = min(backend.next_power_of_2(num_columns), 1024)
    num_blocks = -(-num_columns // block)
    _combine_kernel.launch(
        y.shape[0] * num_blocks,
        rows_ptr=rows,
        scores_ptr=scores,
        row_ptr=index.row_of_pair,
        y_ptr=y,
        num_columns=num_columns,
        num_blocks=num_blocks,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=max(1, block // 256),
    )
