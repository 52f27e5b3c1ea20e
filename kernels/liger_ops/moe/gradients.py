"""The gradients of experts' products: of what goes into the activation, of scores and of weights."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.moe.gate import Gate, gate_values
from liger_ops.moe.index import Index
from liger_ops.moe.tiles import (
    arguments_of,
    choose_gradient_blocks,
    find_tile,
    halve,
    multiply,
    multiply_low,
    precision_of,
    split_pairs,
)


@triton.jit
def _gate_gradients(
    grad_a, first_column, rows, inside, scores, z_ptr, grad_z_ptr, scaled_ptr, width, constants,
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
        gate, up = split_pairs(z, BLOCK_ROWS, BLOCK_COLUMNS)
    else:
        places = long_rows[:, None] * (1 + GATED) * width + columns[None, :]
        gate = tl.load(z_ptr + places, mask=mask, other=0.0).to(tl.float32)
        up = None
        if GATED == 1:
            up = tl.load(z_ptr + places + width, mask=mask, other=0.0).to(tl.float32)
    a, slope, by_up = gate_values(gate, up, constants, ACTIVATION, LIMIT, HALF)
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
    low_ptr,  # [num_pairs, rank] and
    low_weight_ptr,  # [num_experts, width, rank], whose product is added; or None
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
    strides,  # of rows, and of the weight's experts, columns and terms
    low_sizes,
    constants,  # see Gate
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # 1 or 2
    BLOCK_TERMS: tl.constexpr,
    EVEN: tl.constexpr,
    LOW_TERMS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes the gradients of z in BLOCK_COLUMNS columns of a tile of rows, and what the scores get."""
    row_stride, expert_stride, column_stride, term_stride = strides
    expert, first_row, end, block = find_tile(
        offsets_ptr, tile_starts_ptr, tile_experts_ptr, num_experts, num_blocks, BLOCK_ROWS
    )
    if expert < 0:
        return
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    inside = rows < end
    pairs = tl.load(pair_ptr + rows, mask=inside, other=0)
    row_ptrs = grad_ptr + (pairs // top_k).to(tl.int64) * row_stride
    columns = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    grad_a = multiply_low(low_ptr, low_weight_ptr, expert, rows, end, columns, width, low_sizes, LOW_TERMS, PRECISION)
    grad_a = multiply(
        grad_a, None, row_ptrs, weight_ptr + expert.to(tl.int64) * expert_stride, 0, columns, width, hidden_size,
        column_stride, term_stride, BLOCK_TERMS, EVEN, NUM_STAGES, PRECISION,
    )  # fmt: skip
    scores = tl.load(scores_ptr + pairs, mask=inside, other=0.0).to(tl.float32)
    PART: tl.constexpr = BLOCK_COLUMNS // NUM_PARTS
    part = tl.zeros((BLOCK_ROWS,), tl.float32)
    rest = grad_a
    # Of a part of the columns at a time, which needs fewer registers.
    for number in tl.static_range(NUM_PARTS):
        if number + 1 < NUM_PARTS:
            own, rest = halve(rest, BLOCK_ROWS)
        else:
            own = rest
        part += _gate_gradients(
            own, block * BLOCK_COLUMNS + number * PART, rows, inside, scores, z_ptr, grad_z_ptr, scaled_ptr,
            width, constants, ACTIVATION, LIMIT, GATED,
        )  # fmt: skip
    tl.store(partial_ptr + rows.to(tl.int64) * num_blocks + block, part, mask=inside)


@triton.jit
def _load_rows(
    ptr, tokens, start, terms, inside, stride, columns, num_columns, GATHERED: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Columns of rows of tokens, all of which are read; or of rows from ``start``, 0 in those not inside."""
    if GATHERED:
        ptrs = ptr + tokens[:, None] * stride + columns[None, :]
        rows = tl.load(ptrs) if EVEN else tl.load(ptrs, mask=(columns < num_columns)[None, :], other=0.0)
    else:
        ptrs = ptr + start.to(tl.int64) * stride + (terms[:, None] * stride + columns[None, :])
        mask = inside[:, None] if EVEN else inside[:, None] & (columns < num_columns)[None, :]
        rows = tl.load(ptrs, mask=mask, other=0.0)
    return rows


@backend.Kernel
def _weight_gradient_kernel(
    left_ptr,  # [num_pairs or num_tokens, num_outputs]
    right_ptr,  # [num_pairs or num_tokens, num_inputs]
    grad_ptr,  # [num_experts, num_outputs, num_inputs]
    pair_ptr,
    offsets_ptr,
    num_outputs,
    num_inputs,
    left_stride,
    right_stride,
    num_output_blocks,
    num_input_blocks,
    TOP_K: tl.constexpr,
    LEFT_GATHERED: tl.constexpr,  # whether left has the rows of tokens; not both have
    RIGHT_GATHERED: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    BLOCK_TERMS: tl.constexpr,
    EVEN: tl.constexpr,
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
    # After the expert's last row, the token of that row is multiplied with 0: it is lost already if it is not finite.
    last = tl.maximum(end - 1, 0)
    # A load whose address the same iteration loads is not done ahead of time, so addresses are carried.
    pairs = tl.load(pair_ptr + tl.minimum(start + terms, last))
    row = start
    for _ in tl.range(start, end, BLOCK_TERMS, num_stages=NUM_STAGES):
        tokens = (pairs // TOP_K).to(tl.int64)
        pairs = tl.load(pair_ptr + tl.minimum(row + BLOCK_TERMS + terms, last))
        inside = terms < end - row
        left = _load_rows(left_ptr, tokens, row, terms, inside, left_stride, outputs, num_outputs, LEFT_GATHERED, EVEN)
        right = _load_rows(
            right_ptr, tokens, row, terms, inside, right_stride, inputs, num_inputs, RIGHT_GATHERED, EVEN
        )
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
        row += BLOCK_TERMS
    mask = (outputs < num_outputs)[:, None] & (inputs < num_inputs)[None, :]
    ptrs = grad_ptr + (expert.to(tl.int64) * num_outputs + outputs[:, None]) * num_inputs + inputs[None, :]
    tl.store(ptrs, total.to(grad_ptr.dtype.element_ty), mask=mask)


@backend.Kernel
def _bias_gradient_kernel(
    rows_ptr,  # [num_pairs, num_columns], or with scores [num_tokens, num_columns]
    scores_ptr,  # [num_pairs] or None: factors of the rows of tokens
    pair_ptr,
    offsets_ptr,
    grad_ptr,  # [num_experts, num_columns]
    num_columns,
    row_stride,
    num_blocks,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program adds up a block of columns of one expert's rows, in float32."""
    program = tl.program_id(0)
    expert = program // num_blocks
    columns = program % num_blocks * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in tl.range(start, end, BLOCK_ROWS):
        rows = begin + tl.arange(0, BLOCK_ROWS)
        inside = rows < end
        mask = inside[:, None] & (columns < num_columns)[None, :]
        if scores_ptr is not None:
            pairs = tl.load(pair_ptr + rows, mask=inside, other=0)
            scores = tl.load(scores_ptr + pairs, mask=inside, other=0.0).to(tl.float32)
            rows = pairs // TOP_K
        values = tl.load(rows_ptr + rows.to(tl.int64)[:, None] * row_stride + columns[None, :], mask=mask, other=0.0)
        values = values.to(tl.float32)
        if scores_ptr is not None:
            values *= scores[:, None]
        total += tl.sum(values, axis=0)
    ptrs = grad_ptr + expert.to(tl.int64) * num_columns + columns
    tl.store(ptrs, total.to(grad_ptr.dtype.element_ty), mask=columns < num_columns)


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
    low: Tensor | None = None,
    low_weight: Tensor | None = None,
) -> None:
    """Writes the gradients of z, the scaled products of gate and up, and the gradients of scores ``[tokens, top_k]``.

    ``grad`` is the output's ``[num_tokens, hidden_size]``, ``weight`` a view ``[num_experts, width, hidden_size]`` of
    down. ``low`` and ``low_weight``: see :func:`~liger_ops.moe.products.product`.
    """
    width, hidden_size = weight.shape[1:]
    arguments = arguments_of(grad, weight, index, block_rows, low, low_weight, width, 128)
    num_blocks = arguments["num_blocks"]
    partial = grad.new_empty((z.shape[0], num_blocks), dtype=torch.float32)
    _gate_backward_kernel.launch(
        index.max_tiles(block_rows) * num_blocks,
        grad_ptr=grad,
        z_ptr=z,
        scores_ptr=scores,
        grad_z_ptr=grad_z,
        scaled_ptr=scaled,
        partial_ptr=partial,
        pair_ptr=index.pair_of_row,
        top_k=scores.shape[1],
        width=width,
        hidden_size=hidden_size,
        GATED=gated,
        NUM_PARTS=2 if arguments["BLOCK_COLUMNS"] >= 64 else 1,
        **gate.constants,
        **arguments,
    )
    _score_gradient_kernel.launch(
        -(-scores.numel() // 256),
        partial_ptr=partial,
        row_ptr=index.row_of_pair,
        grad_ptr=grad_scores,
        num_pairs=scores.numel(),
        num_blocks=num_blocks,
        BLOCK=256,
        num_warps=4,
    )


def weight_gradient(
    left: Tensor, right: Tensor, index: Index, top_k: int, left_gathered: bool | None, grad: Tensor
) -> None:
    """Writes ``left.T @ right`` over the rows of each expert, one of which has the rows of tokens, or none for None.

    ``grad`` is ``[num_experts, columns of left, columns of right]``.
    """
    num_experts, num_outputs, num_inputs = grad.shape
    shared_bytes = backend.hardware(left.device).ahead_bytes
    blocks = choose_gradient_blocks(num_outputs, num_inputs, left.dtype, left_gathered is True, shared_bytes)
    num_output_blocks, num_input_blocks = -(-num_outputs // blocks.rows), -(-num_inputs // blocks.columns)
    _weight_gradient_kernel.launch(
        num_experts * num_output_blocks * num_input_blocks,
        left_ptr=left,
        right_ptr=right,
        grad_ptr=grad,
        pair_ptr=index.pair_of_row,
        offsets_ptr=index.offsets,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        left_stride=left.stride(0),
        right_stride=right.stride(0),
        num_output_blocks=num_output_blocks,
        num_input_blocks=num_input_blocks,
        TOP_K=top_k,
        LEFT_GATHERED=left_gathered is True,
        RIGHT_GATHERED=left_gathered is False,
        BLOCK_OUTPUTS=blocks.rows,
        BLOCK_INPUTS=blocks.columns,
        BLOCK_TERMS=blocks.terms,
        EVEN=num_outputs % blocks.rows == 0 and num_inputs % blocks.columns == 0,
        NUM_STAGES=blocks.num_stages,
        PRECISION=precision_of(left.dtype),
        num_warps=blocks.num_warps,
    )


def bias_gradient(rows: Tensor, scores: Tensor | None, index: Index, top_k: int, grad: Tensor) -> None:
    """Writes the sums of each expert's rows, ``[num_experts, columns]``; of rows of tokens times scores, if given."""
    num_experts, num_columns = grad.shape
    block = min(backend.next_power_of_2(num_columns), 64)
    num_blocks = -(-num_columns // block)
    _bias_gradient_kernel.launch(
        num_experts * num_blocks,
        rows_ptr=rows,
        scores_ptr=scores,
        pair_ptr=index.pair_of_row,
        offsets_ptr=index.offsets,
        grad_ptr=grad,
        num_columns=num_columns,
        row_stride=rows.stride(0),
        num_blocks=num_blocks,
        TOP_K=top_k,
        BLOCK_ROWS=64,
        BLOCK=block,
        num_warps=4,
    )
