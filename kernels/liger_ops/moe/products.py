"""Matrix products of experts: each tile of rows, which all belong to one expert, with that expert's weight.

Rows of tokens are gathered where they are loaded, so nothing is permuted in memory. Rows beyond an expert's last one
are computed and not stored; they never mix with others, except in gradients of weights, where they are masked.
Weights come with the strides of their dimensions ``(expert, output feature, input feature)``, in any layout.
"""

from typing import Any

import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.moe.gate import Gate, gate_values
from liger_ops.moe.index import Index
from liger_ops.moe.tiles import arguments_of, find_tile, multiply, multiply_low, split_pairs


@backend.Kernel
def _product_kernel(
    left_ptr,  # [num_tokens, num_terms], or [num_pairs, num_terms] without pairs
    weight_ptr,  # [num_experts, width or 2 * width, num_terms]
    bias_ptr,  # [num_experts, width or 2 * width] or None
    low_ptr,  # [num_pairs, rank] and
    low_weight_ptr,  # [num_experts, width or 2 * width, rank], whose product is added; or None
    z_ptr,  # [num_pairs, width or 2 * width], products in the order of the weight, or None
    a_ptr,  # [num_pairs, width], what the gate makes of products; None for products alone
    pair_ptr,  # pair of each row, or None
    offsets_ptr,
    tile_starts_ptr,
    tile_experts_ptr,
    top_k,
    num_experts,
    num_blocks,
    width,
    num_terms,
    strides,  # of rows, and of the weight's experts, columns and terms
    low_sizes,
    constants,  # see Gate
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,  # 0 without up, 1 with up after all of the gate, 2 with up in odd columns
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,  # of a
    BLOCK_TERMS: tl.constexpr,
    EVEN: tl.constexpr,
    LOW_TERMS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes BLOCK_COLUMNS columns of a tile of rows: products, or what the gate makes of them too."""
    row_stride, expert_stride, column_stride, term_stride = strides
    expert, first_row, end, block = find_tile(
        offsets_ptr, tile_starts_ptr, tile_experts_ptr, num_experts, num_blocks, BLOCK_ROWS
    )
    if expert < 0:
        return
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    if a_ptr is not None:
        left_rows = (tl.load(pair_ptr + rows, mask=rows < end, other=0) // top_k).to(tl.int64)
    else:
        rows = rows.to(tl.int64)
        left_rows = tl.minimum(rows, end - 1)
        if pair_ptr is not None:
            left_rows = (tl.load(pair_ptr + left_rows) // top_k).to(tl.int64)
    inside = rows < end
    row_ptrs = left_ptr + left_rows * row_stride
    columns = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = inside[:, None] & (columns < width)[None, :]
    weight = weight_ptr + expert.to(tl.int64) * expert_stride
    HALF: tl.constexpr = left_ptr.dtype.element_ty != tl.float32
    z_width = width
    if GATED > 0:
        z_width = 2 * width
    bias = bias_ptr
    if bias_ptr is not None:
        bias += expert.to(tl.int64) * z_width
    long_rows = rows.to(tl.int64)
    if GATED == 1:
        gate = multiply_low(low_ptr, low_weight_ptr, expert, rows, end, columns, width, low_sizes, LOW_TERMS, PRECISION)
        low_up_ptr = low_weight_ptr
        if low_ptr is not None:
            low_up_ptr += width * low_sizes[2]
        up = multiply_low(low_ptr, low_up_ptr, expert, rows, end, columns, width, low_sizes, LOW_TERMS, PRECISION)
        gate, up = multiply(
            gate, up, row_ptrs, weight, width * column_stride, columns, width, num_terms, column_stride, term_stride,
            BLOCK_TERMS, EVEN, NUM_STAGES, PRECISION,
        )  # fmt: skip
        if bias_ptr is not None:
            gate += tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + width + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
        a, _, _ = gate_values(gate, up, constants, ACTIVATION, LIMIT, HALF)
        if z_ptr is not None:
            z_ptrs = z_ptr + long_rows[:, None] * z_width + columns[None, :]
            tl.store(z_ptrs, gate.to(z_ptr.dtype.element_ty), mask=mask)
            tl.store(z_ptrs + width, up.to(z_ptr.dtype.element_ty), mask=mask)
    else:
        PARTS: tl.constexpr = 2 if GATED == 2 else 1
        all_columns = block * BLOCK_COLUMNS * PARTS + tl.arange(0, BLOCK_COLUMNS * PARTS)
        z = multiply_low(
            low_ptr, low_weight_ptr, expert, rows, end, all_columns, z_width, low_sizes, LOW_TERMS, PRECISION
        )
        z = multiply(
            z, None, row_ptrs, weight, 0, all_columns, z_width, num_terms, column_stride, term_stride,
            BLOCK_TERMS, EVEN, NUM_STAGES, PRECISION,
        )  # fmt: skip
        if bias_ptr is not None:
            z += tl.load(bias + all_columns, mask=all_columns < z_width, other=0.0).to(tl.float32)[None, :]
        if GATED == 2:
            gate, up = split_pairs(z, BLOCK_ROWS, BLOCK_COLUMNS)
            a, _, _ = gate_values(gate, up, constants, ACTIVATION, LIMIT, HALF)
        elif a_ptr is not None:
            a, _, _ = gate_values(z, None, constants, ACTIVATION, LIMIT, HALF)
        if z_ptr is not None:
            z_ptrs = z_ptr + long_rows[:, None] * z_width + all_columns[None, :]
            z_mask = inside[:, None] & (all_columns < z_width)[None, :]
            tl.store(z_ptrs, z.to(z_ptr.dtype.element_ty), mask=z_mask)
    if a_ptr is not None:
        tl.store(a_ptr + long_rows[:, None] * width + columns[None, :], a.to(a_ptr.dtype.element_ty), mask=mask)


_NO_GATE = Gate().constants


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
    low: Tensor | None = None,
    low_weight: Tensor | None = None,
) -> None:
    """Writes the products with gate and up ``z`` (if not None) and ``a``, the activation's output.

    ``weight`` is a view ``[num_experts, width or 2 * width, hidden_size]`` of any strides. ``gated`` is 0 without up,
    1 with up after the gate, 2 with up in odd features. ``low`` and ``low_weight``: see :func:`product`.
    """
    width = a.shape[1]
    products = (128, 2) if gated else (256, 1)
    arguments = arguments_of(x, weight, index, block_rows, low, low_weight, width, *products)
    _product_kernel.launch(
        index.max_tiles(block_rows) * arguments["num_blocks"],
        left_ptr=x,
        bias_ptr=bias,
        z_ptr=z,
        a_ptr=a,
        pair_ptr=index.pair_of_row,
        top_k=top_k,
        width=width,
        num_terms=x.shape[1],
        GATED=gated,
        **gate.constants,
        **arguments,
    )


def product(
    left: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Index,
    block_rows: int,
    y: Tensor,
    low: Tensor | None = None,
    low_weight: Tensor | None = None,
    top_k: int | None = None,
) -> None:
    """Writes ``left @ weight[expert].T + low @ low_weight[expert].T + bias[expert]`` of each row.

    ``weight`` is a view of any strides. ``low`` is ``[num_pairs, rank]``, ``low_weight`` of ``[num_experts, columns,
    rank]``. With ``top_k``, ``left`` has the rows of tokens.
    """
    num_columns, num_terms = weight.shape[1:]
    arguments = arguments_of(left, weight, index, block_rows, low, low_weight, num_columns)
    _product_kernel.launch(
        index.max_tiles(block_rows) * arguments["num_blocks"],
        left_ptr=left,
        bias_ptr=bias,
        z_ptr=y,
        a_ptr=None,
        pair_ptr=None if top_k is None else index.pair_of_row,
        top_k=top_k or 1,
        width=num_columns,
        num_terms=num_terms,
        GATED=0,
        **_NO_GATE,
        **arguments,
    )


def narrow(left: Tensor, weight: Tensor | None, index: Index, block_rows: int, top_k: int | None = None) -> Any:
    """The product with a weight of few columns, for ``low`` of another product; None without a weight."""
    if weight is None:
        return None
    y = left.new_empty((index.pair_of_row.numel(), weight.shape[1]))
    product(left, weight, None, index, block_rows, y, top_k=top_k)
    return y


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
