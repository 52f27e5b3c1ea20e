"""Triton kernels from logits that are stored by columns to each token's loss, statistics and gradient.

Neighbours in memory are logits of neighbouring tokens for one class, as they are in the memory of the head's gradient:
see :mod:`liger_ops.loss.gradient_memory`. A program has a tile of tokens and a range of classes. Three kernels follow
each other: sums of each range, which are read and merged for each token, and the gradient, which reads the logits a
second time. A tile is ``[TOKENS * LANES, COLUMNS]``: each of its rows is a token and every LANES-th class, so that a
thread keeps sums of its own and no warp waits for another inside the loop.
"""

import triton
import triton.language as tl

from liger_ops import backend
from liger_ops.loss.row_kernels import absorb_block, merge_sums, store_token
from liger_ops.loss.row_math import (
    factor_of_exp,
    gradient,
    gradient_factors,
    load_weights,
    rounding_of,
    shifted_exp,
    to_exponent,
    transform,
)


@triton.jit
def _tile(
    program, num_tiles, num_rows, column_stride, TOKENS: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr
):
    """Of a program: its range's number, each group's row and whether it exists, and offsets and columns of a tile."""
    groups = tl.arange(0, TOKENS * LANES)
    rows = program % num_tiles * TOKENS + groups % TOKENS
    columns = (groups // TOKENS)[:, None] + LANES * tl.arange(0, COLUMNS)[None, :]
    offsets = rows[:, None] + columns * column_stride
    return program // num_tiles, rows, rows < num_rows, offsets, columns


@triton.jit
def _by_token(values, TOKENS: tl.constexpr, LANES: tl.constexpr):
    """Values of a tile's groups as ``[LANES, TOKENS]``."""
    return tl.reshape(values, [LANES, TOKENS])


@backend.Kernel
def column_sums_kernel(
    logits_ptr,  # [vocab_size, num_rows]
    token_index_ptr,  # [num_rows], the token of each row, or None if rows are the tokens in order
    labels_ptr,  # [num_tokens]
    class_weight_ptr,  # [vocab_size] or None
    label_z_ptr,  # [num_rows], float32, written where the label is a class
    maxima_ptr,  # [num_ranges, num_rows], float32, as are the rest; see absorb_block
    normalisers_ptr,
    weighted_sums_ptr,  # or None
    expected_ptr,  # or None
    predictions_ptr,  # int32, or None
    column_stride,
    num_rows,
    vocab_size,
    range_size,
    num_tiles,
    softcap,  # None if it is not used, as is the next
    logit_scale,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program reduces a range of classes of a tile of tokens."""
    HALF: tl.constexpr = logits_ptr.dtype.element_ty != tl.float32
    WITH_SUM: tl.constexpr = weighted_sums_ptr is not None
    WITH_STATS: tl.constexpr = predictions_ptr is not None
    BLOCK: tl.constexpr = LANES * COLUMNS
    number, _, exist, offsets, columns = _tile(
        tl.program_id(0), num_tiles, num_rows, column_stride, TOKENS, LANES, COLUMNS
    )
    begin = number * range_size
    end = tl.minimum(begin + range_size, vocab_size)
    full_end = begin + tl.maximum(end - begin, 0) // BLOCK * BLOCK
    maxima = tl.full([TOKENS * LANES], -float("inf"), dtype=tl.float32)
    normalisers = tl.zeros([TOKENS * LANES], dtype=tl.float32)
    weighted_sums = tl.zeros([TOKENS * LANES], dtype=tl.float32)
    expected = tl.zeros([TOKENS * LANES], dtype=tl.float32)
    squares = tl.zeros([TOKENS * LANES], dtype=tl.float32)
    best_starts = tl.full([TOKENS * LANES], begin, dtype=tl.int32)
    mask = tl.broadcast_to(exist[:, None], offsets.shape)
    for start in range(begin, full_end, BLOCK):
        logits = tl.load(logits_ptr + tl.cast(start, tl.int64) * column_stride + offsets, mask=mask, other=0.0)
        maxima, normalisers, weighted_sums, expected, squares, best_starts = absorb_block(
            transform(logits, logit_scale, softcap), start + columns, mask, start, class_weight_ptr, maxima,
            normalisers, weighted_sums, expected, squares, best_starts, HALF, WITH_SUM, WITH_STATS, False,
        )  # fmt: skip
    if full_end < end:
        rest_mask = mask & (full_end + columns < end)
        rest_ptr = logits_ptr + tl.cast(full_end, tl.int64) * column_stride
        logits = tl.load(rest_ptr + offsets, mask=rest_mask, other=0.0)
        z = tl.where(rest_mask, transform(logits, logit_scale, softcap), -float("inf"))
        maxima, normalisers, weighted_sums, expected, squares, best_starts = absorb_block(
            z, full_end + columns, rest_mask, full_end, class_weight_ptr, maxima, normalisers, weighted_sums, expected,
            squares, best_starts, HALF, WITH_SUM, WITH_STATS, False,
        )  # fmt: skip

    of_lanes = _by_token(maxima, TOKENS, LANES)
    maximum = tl.max(of_lanes, axis=0)
    shift = tl.where(maximum == -float("inf"), 0.0, maximum)
    normaliser, weighted_sum, expected_excess, _ = merge_sums(
        of_lanes, _by_token(normalisers, TOKENS, LANES), _by_token(weighted_sums, TOKENS, LANES),
        _by_token(expected, TOKENS, LANES), _by_token(squares, TOKENS, LANES), shift, HALF, WITH_STATS, False,
    )  # fmt: skip
    tile_rows = tl.program_id(0) % num_tiles * TOKENS + tl.arange(0, TOKENS)
    stored = tile_rows < num_rows
    places = tl.cast(number, tl.int64) * num_rows + tile_rows
    tl.store(maxima_ptr + places, maximum, mask=stored)
    tl.store(normalisers_ptr + places, normaliser, mask=stored)
    if WITH_SUM:
        tl.store(weighted_sums_ptr + places, weighted_sum, mask=stored)
    if WITH_STATS:
        tl.store(expected_ptr + places, expected_excess, mask=stored)
        # Searching for the largest logit once, within the block that each group noted, is cheaper than in every block.
        best = tl.reshape(tl.broadcast_to(maximum[None, :], [LANES, TOKENS]), [TOKENS * LANES])
        classes = best_starts[:, None] + columns
        searched = (exist & (maxima == best))[:, None] & (classes < end)
        best_offsets = tl.cast(best_starts, tl.int64)[:, None] * column_stride + offsets
        z = transform(tl.load(logits_ptr + best_offsets, mask=searched, other=0.0), logit_scale, softcap)
        candidates = tl.min(tl.where(searched & (z == best[:, None]), classes, vocab_size - 1), axis=1)
        tl.store(predictions_ptr + places, tl.min(_by_token(candidates, TOKENS, LANES), axis=0), mask=stored)

    tokens = tile_rows
    if token_index_ptr is not None:
        tokens = tl.load(token_index_ptr + tile_rows, mask=stored, other=0)
    labels = tl.load(labels_ptr + tokens, mask=stored, other=-1)
    is_here = stored & (labels >= begin) & (labels < end)
    # Here, as another program may already have overwritten it when the gradient is written.
    label_logits = tl.load(logits_ptr + labels * column_stride + tile_rows, mask=is_here, other=0.0)
    tl.store(label_z_ptr + tile_rows, transform(label_logits, logit_scale, softcap), mask=is_here)


@backend.Kernel
def column_tokens_kernel(
    maxima_ptr,  # see column_sums_kernel, as the next five
    normalisers_ptr,
    weighted_sums_ptr,
    expected_ptr,
    range_predictions_ptr,
    label_z_ptr,
    token_index_ptr,
    labels_ptr,
    class_weight_ptr,
    class_weight_sum_ptr,  # [] or None
    token_weight_ptr,  # [num_tokens] or None
    grad_scale_ptr,  # [] or [num_tokens], or None
    losses_ptr,  # [num_tokens], as are the rest; see store_token
    lse_ptr,
    log_probs_ptr,
    entropy_ptr,
    predictions_ptr,
    correct_ptr,
    factors_ptr,  # [4, num_rows], float32, or None: lse, factor of the exponential, label and smoothing term
    grad_scale_stride,
    num_rows,
    vocab_size,
    num_ranges,
    ignore_index,
    label_smoothing,  # None if it is not used, as are the next two; see TokenLossOptions
    softcap,
    logit_scale,
    z_loss_weight,
    HALF: tl.constexpr,
    RANGES: tl.constexpr,  # num_ranges or more
    TOKENS: tl.constexpr,
):
    """One program merges the ranges of some tokens and writes their losses, stats and the factors of their gradient."""
    WITH_SUM: tl.constexpr = weighted_sums_ptr is not None
    WITH_STATS: tl.constexpr = predictions_ptr is not None
    # Lanes past the end repeat the last row, and write what it writes.
    rows = tl.minimum(tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), num_rows - 1)
    ranges = tl.arange(0, RANGES)
    places = ranges[:, None] * num_rows + rows[None, :]
    mask = tl.broadcast_to((ranges < num_ranges)[:, None], places.shape)
    maxima = tl.load(maxima_ptr + places, mask=mask, other=-float("inf"))
    normalisers = tl.load(normalisers_ptr + places, mask=mask, other=0.0)
    weighted_sums, expected = normalisers, normalisers
    if WITH_SUM:
        weighted_sums = tl.load(weighted_sums_ptr + places, mask=mask, other=0.0)
    if WITH_STATS:
        expected = tl.load(expected_ptr + places, mask=mask, other=0.0)
    maximum = tl.max(maxima, axis=0)
    shift = tl.where(maximum == -float("inf"), 0.0, maximum)
    normaliser, weighted_sum, expected_excess, squares = merge_sums(
        maxima, normalisers, weighted_sums, expected, normalisers, shift, HALF, WITH_STATS, False
    )
    prediction = 0
    if WITH_STATS:
        found = tl.load(range_predictions_ptr + places, mask=mask, other=0)
        prediction = tl.min(tl.where(mask & (maxima == maximum[None, :]), found, vocab_size - 1), axis=0)

    token = tl.cast(rows, tl.int64)
    if token_index_ptr is not None:
        token = tl.load(token_index_ptr + rows)
    label = tl.load(labels_ptr + token)
    kept = label != ignore_index
    label_weight, class_weight_sum, token_weight = load_weights(
        class_weight_ptr, class_weight_sum_ptr, token_weight_ptr, token, label, vocab_size
    )
    in_range = (label >= 0) & (label < vocab_size)
    label_z = tl.load(label_z_ptr + rows, mask=in_range, other=0.0)
    lse, lse_error = store_token(
        losses_ptr, lse_ptr, None, log_probs_ptr, entropy_ptr, predictions_ptr, correct_ptr, None, None, token, label,
        kept, label_z, maximum, normaliser, rounding_of(shift, to_exponent(shift, HALF), HALF), weighted_sum,
        expected_excess, squares, prediction, label_weight, class_weight_sum, token_weight, vocab_size,
        label_smoothing, z_loss_weight,
    )  # fmt: skip
    if factors_ptr is not None:
        probability_factor, label_term, smoothing_term = gradient_factors(
            grad_scale_ptr, grad_scale_stride, token, kept, lse, label_weight, class_weight_sum, token_weight, 1.0,
            vocab_size, label_smoothing, logit_scale, z_loss_weight,
        )  # fmt: skip
        tl.store(factors_ptr + rows, lse)
        tl.store(factors_ptr + num_rows + rows, factor_of_exp(probability_factor, lse, lse_error, HALF))
        tl.store(factors_ptr + 2 * num_rows + rows, label_term)
        if label_smoothing is not None:
            tl.store(factors_ptr + 3 * num_rows + rows, smoothing_term)


@backend.Kernel
def column_gradient_kernel(
    logits_ptr,  # [vocab_size, num_rows]
    grad_logits_ptr,  # like logits, may be the same
    token_index_ptr,
    labels_ptr,
    class_weight_ptr,
    factors_ptr,  # see column_tokens_kernel
    column_stride,
    grad_column_stride,
    num_rows,
    vocab_size,
    range_size,
    num_tiles,
    num_ranges,
    ignore_index,
    label_smoothing,
    softcap,
    logit_scale,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program writes the gradient of a range of classes of a tile of tokens, zeros if they are ignored."""
    HALF: tl.constexpr = logits_ptr.dtype.element_ty != tl.float32
    BLOCK: tl.constexpr = LANES * COLUMNS
    # Ranges that were read last are still in the L2 cache.
    program = num_tiles * num_ranges - 1 - tl.program_id(0)
    number, rows, exist, offsets, columns = _tile(program, num_tiles, num_rows, column_stride, TOKENS, LANES, COLUMNS)
    grad_offsets = rows[:, None] + columns * grad_column_stride
    tokens = rows
    if token_index_ptr is not None:
        tokens = tl.load(token_index_ptr + rows, mask=exist, other=0)
    labels = tl.load(labels_ptr + tokens, mask=exist, other=ignore_index)
    kept = labels != ignore_index
    lse = tl.load(factors_ptr + rows, mask=exist, other=0.0)
    exp_factor = tl.load(factors_ptr + num_rows + rows, mask=exist, other=0.0)
    label_term = tl.load(factors_ptr + 2 * num_rows + rows, mask=exist, other=0.0)
    smoothing_term = label_term
    if label_smoothing is not None:
        smoothing_term = tl.load(factors_ptr + 3 * num_rows + rows, mask=exist, other=0.0)
    exponent = to_exponent(lse, HALF)
    begin = number * range_size
    end = tl.minimum(begin + range_size, vocab_size)
    for start in range(begin, end, BLOCK):
        classes = start + columns
        mask = exist[:, None] & (classes < end)
        far = tl.cast(start, tl.int64)
        z = transform(tl.load(logits_ptr + far * column_stride + offsets, mask=mask, other=0.0), logit_scale, softcap)
        label_terms = tl.where(classes == labels[:, None], label_term[:, None], 0.0)
        grad = gradient(
            shifted_exp(z, exponent[:, None], HALF), z, classes, mask, class_weight_ptr, exp_factor[:, None],
            label_terms, smoothing_term[:, None], None, 0.0, label_smoothing, softcap,
        )  # fmt: skip
        grad = tl.where(kept[:, None], grad, 0.0).to(grad_logits_ptr.dtype.element_ty)
        tl.store(grad_logits_ptr + far * grad_column_stride + grad_offsets, grad, mask=mask)
