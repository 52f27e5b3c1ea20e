"""Triton kernels from logits to each token's loss, statistics and gradient; the formula is in ``cross_entropy``.

A program owns whole rows. Rows up to ``MAX_ROW_IN_REGISTERS`` bytes are read once and written once. Longer ones are
read twice, block by block: so few rows are under way at a time that the second reading finds them in the L2 cache.
Within a block every thread keeps the running maximum and normalizer of the columns that it loads (Milakov and
Gimelshein, arXiv:1805.02867), merged only at the end of the row.
"""

import triton
import triton.language as tl

from liger_ops import backend
from liger_ops.loss.row_math import (
    before,
    decay_of,
    factor_of_exp,
    gradient,
    gradient_factors,
    load_class_weight,
    load_edges,
    load_weights,
    move_excess,
    rounding_of,
    shifted_exp,
    size_of_groups,
    start_of_row,
    store_edges,
    store_groups_gradient,
    tempered,
    to_exponent,
    transform,
)


@triton.jit
def _mean_scale(
    labels_ptr,  # [num_tokens]
    class_weight_ptr,  # [vocab_size] or None
    token_weight_ptr,  # [num_tokens] or None
    num_tokens,
    vocab_size,
    ignore_index,
    BLOCK_SIZE: tl.constexpr,
):
    """1 / the summed weight of the tokens that are not ignored (0 if that is 0); every program gets the same."""
    offsets = tl.arange(0, BLOCK_SIZE).to(tl.int64)
    totals = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, num_tokens, BLOCK_SIZE):
        tokens = start + offsets
        labels = tl.load(labels_ptr + tokens, mask=tokens < num_tokens, other=ignore_index)
        kept = labels != ignore_index
        weights = kept.to(tl.float32)
        if class_weight_ptr is not None:
            is_class = kept & (labels >= 0) & (labels < vocab_size)
            weights *= tl.load(class_weight_ptr + labels, mask=is_class, other=0.0).to(tl.float32)
        if token_weight_ptr is not None:
            weights *= tl.load(token_weight_ptr + tokens, mask=kept, other=0.0).to(tl.float32)
        totals += weights
    total = tl.sum(totals, axis=0)
    return tl.where(total == 0.0, 0.0, 1.0 / total)


@triton.jit
def _store_token(
    output_ptrs,  # of loss_kernel, from losses_ptr on
    token,
    label,
    kept,
    label_z,
    maximum,
    rounding,
    sums,  # see _add_edges
    weights,  # see load_weights
    vocab_size,
    label_smoothing,
    z_loss_weight,
):
    """Writes one token's loss and stats, zeros if it is ignored; returns its lse and the lse's rounding error."""
    (
        losses_ptr, lse_ptr, lse_error_ptr, log_probs_ptr, entropy_ptr, predictions_ptr, correct_ptr, mean_logit_ptr,
        log_sum_sq_probs_ptr,
    ) = output_ptrs  # fmt: skip
    normalizer, weighted_sum, expected_excess, squares, prediction = sums
    label_weight, class_weight_sum, token_weight = weights
    log_normalizer = tl.log(normalizer) - rounding
    lse = maximum + log_normalizer
    # Exact, since the summand of larger magnitude is taken away first.
    maximum_is_larger = tl.abs(maximum) >= tl.abs(log_normalizer)
    larger = tl.where(maximum_is_larger, maximum, log_normalizer)
    lse_error = tl.where(maximum_is_larger, log_normalizer, maximum) - (lse - larger)
    log_probability = label_z - lse - lse_error
    loss = -label_weight * log_probability
    if label_smoothing is not None:
        spread = class_weight_sum * lse - weighted_sum
        loss = (1.0 - label_smoothing) * loss + label_smoothing / vocab_size * spread
    loss = (loss + z_loss_weight * lse * lse) * token_weight
    if losses_ptr is not None:
        tl.store(losses_ptr + token, tl.where(kept, loss, 0.0))
    if lse_ptr is not None:
        tl.store(lse_ptr + token, tl.where(kept, lse, 0.0))
    if lse_error_ptr is not None:
        tl.store(lse_error_ptr + token, tl.where(kept, lse_error, 0.0))
    if log_probs_ptr is not None:
        nan_unless_class = tl.where((label >= 0) & (label < vocab_size), 0.0, float("nan"))
        tl.store(log_probs_ptr + token, tl.where(kept, log_probability + nan_unless_class, 0.0))
    if entropy_ptr is not None:
        tl.store(entropy_ptr + token, tl.where(kept, log_normalizer - expected_excess / normalizer, 0.0))
    if predictions_ptr is not None:
        tl.store(predictions_ptr + token, tl.where(kept, prediction.to(tl.int64), label))
    if correct_ptr is not None:
        tl.store(correct_ptr + token, kept & (prediction == label))
    if mean_logit_ptr is not None:
        tl.store(mean_logit_ptr + token, tl.where(kept, weighted_sum / vocab_size, 0.0))
    if log_sum_sq_probs_ptr is not None:
        tl.store(log_sum_sq_probs_ptr + token, tl.where(kept, tl.log(squares) - 2.0 * tl.log(normalizer), 0.0))
    return lse, lse_error


@triton.jit
def _sum(values):
    return tl.sum(tl.sum(values, axis=1), axis=0)


@triton.jit
def _add_edges(
    edges,  # see load_edges
    maximum,  # of the row, as are the following
    shift,
    exponent,
    sums,
    class_weight_ptr,
    vocab_size,
    HALF: tl.constexpr,
    WITH_SUM: tl.constexpr,
    WITH_STATS: tl.constexpr,
):
    """Adds a row's edges to its sums, and to the search for the first column of the maximum.

    The sums are those of exp(z - maximum), times exp(rounding); of z by class weight; of exp(z - maximum) * (z -
    maximum), times exp(rounding); of exp(z - maximum)**2, times exp(rounding)**2; and the prediction.
    """
    columns, in_row, z = edges
    normalizer, weighted_sum, expected_excess, squares, prediction = sums
    numerator = shifted_exp(z, exponent, HALF)
    if WITH_SUM:
        weight = load_class_weight(class_weight_ptr, columns, in_row)
        weighted_sum += tl.sum(tl.where(in_row, weight * z, 0.0), axis=0)
    if WITH_STATS:
        expected_excess += tl.sum(tl.where(numerator > 0.0, numerator * (z - shift), 0.0), axis=0)
        found = tl.min(tl.where(in_row & (z == maximum), columns, vocab_size - 1), axis=0)
        prediction = tl.minimum(prediction, found)
    squares += tl.sum(numerator * numerator, axis=0)
    return normalizer + tl.sum(numerator, axis=0), weighted_sum, expected_excess, squares, prediction


@triton.jit
def _reduce_row(
    z,  # [num_groups, GROUP], anything finite outside the row
    columns,  # like z
    in_row,  # like z
    edges,  # see load_edges, or None without edges
    class_weight_ptr,
    vocab_size,
    HALF: tl.constexpr,
    EVEN: tl.constexpr,
    WITH_SUM: tl.constexpr,
    WITH_STATS: tl.constexpr,
    WITH_SQUARES: tl.constexpr,
):
    """Reduces a row held whole: z (-inf outside it), exp(z - maximum), and all that ``_reduce_blocks`` returns."""
    weighted_sum = 0.0
    if WITH_SUM:
        weighted_sum = _sum(z * load_class_weight(class_weight_ptr, columns, in_row))
    if not EVEN:
        z = tl.where(in_row, z, -float("inf"))
    maximum = tl.max(tl.max(z, axis=1), axis=0)
    if edges is not None:
        maximum = tl.maximum(maximum, tl.max(edges[2], axis=0))
    # While every logit is -inf, subtracting their maximum would give NaN where nothing is known.
    shift = tl.where(maximum == -float("inf"), 0.0, maximum)
    exponent = to_exponent(shift, HALF)
    numerator = shifted_exp(z, exponent, HALF)
    normalizer = _sum(numerator)
    expected_excess = 0.0
    prediction = 0
    if WITH_STATS:
        expected_excess = _sum(tl.where(numerator > 0.0, numerator * (z - shift), 0.0))
        prediction = tl.min(tl.min(tl.where(z == maximum, columns, vocab_size - 1), axis=1), axis=0)
        prediction = tl.minimum(prediction, vocab_size - 1)  # where every logit is -inf, as are places past the row
    squares = 0.0
    if WITH_SQUARES:
        squares = _sum(numerator * numerator)
    sums = (normalizer, weighted_sum, expected_excess, squares, prediction)
    if edges is not None:
        sums = _add_edges(
            edges, maximum, shift, exponent, sums, class_weight_ptr, vocab_size, HALF, WITH_SUM, WITH_STATS
        )
    return z, numerator, maximum, rounding_of(shift, exponent, HALF), sums


@triton.jit
def _absorb_block(
    z,  # [num_groups, GROUP], -inf past the row's end
    columns,  # like z
    mask,  # like z
    start,
    class_weight_ptr,
    state,  # [num_groups] each: the maximum, the sums, and where the first block with the maximum starts
    HALF: tl.constexpr,
    WITH_SUM: tl.constexpr,
    WITH_STATS: tl.constexpr,
    WITH_SQUARES: tl.constexpr,
):
    """Adds one block of a row to the running state of each group of columns."""
    maximum, normalizer, weighted_sum, expected_excess, squares, best_start = state
    block_maximum = tl.max(z, axis=1)
    new_maximum = tl.maximum(maximum, block_maximum)
    # While every logit so far is -inf, subtracting their maximum would give NaN.
    shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    exponent = to_exponent(shift, HALF)
    decay = decay_of(maximum, exponent, HALF)
    numerator = shifted_exp(z, exponent[:, None], HALF)
    seen = normalizer
    normalizer = normalizer * decay + tl.sum(numerator, axis=1)
    if WITH_SQUARES:
        squares = squares * decay * decay + tl.sum(numerator * numerator, axis=1)
    if WITH_SUM:
        weight = load_class_weight(class_weight_ptr, columns, mask)
        weighted_sum += tl.sum(tl.where(mask, weight * z, 0.0), axis=1)
    if WITH_STATS:
        excess = tl.sum(tl.where(numerator > 0.0, numerator * (z - shift[:, None]), 0.0), axis=1)
        expected_excess = move_excess(expected_excess, seen, maximum, shift) * decay + excess
        # The first block of the row may come after others.
        is_better = (block_maximum > maximum) | ((block_maximum == maximum) & (start < best_start))
        best_start = tl.where(is_better, start, best_start)
    return new_maximum, normalizer, weighted_sum, expected_excess, squares, best_start


@triton.jit
def _reduce_blocks(
    row_ptr,  # to the first whole group of the row
    lead,  # see start_of_row
    size,  # see size_of_groups
    groups,  # [num_groups], places of the first block, as the next
    places,  # [num_groups, GROUP]
    edges,  # see load_edges, or None without edges
    kept,
    class_weight_ptr,
    vocab_size,
    scales,  # see transform
    HALF: tl.constexpr,
    WITH_SUM: tl.constexpr,
    WITH_STATS: tl.constexpr,
    WITH_SQUARES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Reduces a row block by block to its maximum, rounding and sums."""
    num_groups: tl.constexpr = BLOCK_SIZE // GROUP
    no_max, nothing = tl.full([num_groups], -float("inf"), dtype=tl.float32), tl.zeros([num_groups], dtype=tl.float32)
    state = (no_max, nothing, nothing, nothing, nothing, tl.zeros([num_groups], dtype=tl.int32))
    full_size = size // BLOCK_SIZE * BLOCK_SIZE
    rest_mask = before(size, full_size + groups, full_size + places, GROUPED)
    # Asked for first, so that its latency passes during the loop.
    rest = tl.load(row_ptr + full_size + places, mask=rest_mask & kept, other=0.0, eviction_policy="evict_last")
    for start in tl.range(0, tl.where(kept, full_size, 0), BLOCK_SIZE, num_stages=NUM_STAGES):
        logits = tl.load(row_ptr + start + places, eviction_policy="evict_last")
        state = _absorb_block(
            transform(logits, scales), start + places + lead, places >= 0, start, class_weight_ptr,
            state, HALF, WITH_SUM, WITH_STATS, WITH_SQUARES,
        )  # fmt: skip
    if kept & (full_size < size):
        z = tl.where(rest_mask, transform(rest, scales), -float("inf"))
        state = _absorb_block(
            z, full_size + places + lead, rest_mask, full_size, class_weight_ptr,
            state, HALF, WITH_SUM, WITH_STATS, WITH_SQUARES,
        )  # fmt: skip
    maxima, normalizers, weighted_sums, expected, squares_of_groups, best_starts = state
    maximum = tl.max(maxima, axis=0)
    if edges is not None:
        maximum = tl.maximum(maximum, tl.max(edges[2], axis=0))
    shift = tl.where(maximum == -float("inf"), 0.0, maximum)
    exponent = to_exponent(shift, HALF)
    decay = decay_of(maxima, exponent, HALF)
    normalizer = tl.sum(normalizers * decay, axis=0)
    weighted_sum = tl.sum(weighted_sums, axis=0)
    squares = tl.sum(squares_of_groups * decay * decay, axis=0)
    expected_excess = 0.0
    prediction = 0
    if WITH_STATS:
        expected_excess = tl.sum(move_excess(expected, normalizers, maxima, shift) * decay, axis=0)
        # Searching for the largest logit once, within the block that each group noted, is cheaper than in every block.
        best_places = best_starts[:, None] + places
        mask = kept & (best_places < size) & (maxima == maximum)[:, None]
        z = transform(tl.load(row_ptr + best_places, mask=mask, other=0.0), scales)
        candidates = tl.where(mask & (z == maximum), best_places + lead, vocab_size - 1)
        prediction = tl.min(tl.min(candidates, axis=1), axis=0)
    sums = (normalizer, weighted_sum, expected_excess, squares, prediction)
    if edges is not None:
        sums = _add_edges(
            edges, maximum, shift, exponent, sums, class_weight_ptr, vocab_size, HALF, WITH_SUM, WITH_STATS
        )
    return maximum, rounding_of(shift, exponent, HALF), sums


@backend.Kernel
def loss_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    grad_logits_ptr,  # [num_rows, vocab_size], may be logits_ptr; None for no gradient
    token_index_ptr,  # [num_rows], the token of each row, or None if rows are the tokens in order
    labels_ptr,  # [num_tokens]
    class_weight_ptr,  # [vocab_size] or None
    class_weight_sum_ptr,  # [] or None
    token_weight_ptr,  # [num_tokens] or None
    grad_scale_ptr,  # [] or [num_tokens], or None
    mean_scale_ptr,  # [], float32, or None; written, and a factor of the gradient
    losses_ptr,  # [num_tokens], float32, or None for what is not wanted, as are the rest
    lse_ptr,
    lse_error_ptr,
    log_probs_ptr,
    entropy_ptr,
    predictions_ptr,  # int64
    correct_ptr,  # bool
    mean_logit_ptr,  # the mean by class weight, if there are any
    log_sum_sq_probs_ptr,
    temperature_ptr,  # [num_tokens], float32, or None
    strides,  # of the rows of logits and their gradient, and of grad_scale
    num_rows,
    vocab_size,
    ignore_index,
    label_smoothing,  # None if it is not used, as are the next two; see TokenLossOptions
    softcap,
    logit_scale,
    z_loss_weight,
    WHOLE_ROW: tl.constexpr,  # whether a row is one block, which is held while its gradient is taken
    EVEN: tl.constexpr,  # whether a row that is one block fills it
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,  # see start_of_row
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes the loss of every num_programs-th row and, on request, its gradient."""
    logits_row_stride, grad_logits_row_stride, grad_scale_stride = strides
    HALF: tl.constexpr = logits_ptr.dtype.element_ty != tl.float32
    WITH_STATS: tl.constexpr = (entropy_ptr is not None) or (predictions_ptr is not None) or (correct_ptr is not None)
    WITH_SQUARES: tl.constexpr = log_sum_sq_probs_ptr is not None
    WITH_SUM: tl.constexpr = (label_smoothing is not None) or (mean_logit_ptr is not None)
    mean_scale = 1.0
    if mean_scale_ptr is not None:
        mean_scale = _mean_scale(
            labels_ptr, class_weight_ptr, token_weight_ptr, num_rows, vocab_size, ignore_index,
            1024 if WHOLE_ROW and BLOCK_SIZE <= 8192 else 4096,  # a few per thread
        )  # fmt: skip
        if tl.program_id(0) == 0:
            tl.store(mean_scale_ptr, mean_scale)
    numbers, lanes = tl.arange(0, BLOCK_SIZE // GROUP), tl.arange(0, GROUP)
    groups = numbers * GROUP
    places = groups[:, None] + lanes[None, :]
    output_ptrs = (
        losses_ptr, lse_ptr, lse_error_ptr, log_probs_ptr, entropy_ptr, predictions_ptr, correct_ptr, mean_logit_ptr,
        log_sum_sq_probs_ptr,
    )  # fmt: skip
    # Whole rows are loaded ahead by this loop, blocks of a row by the loops over its blocks.
    row_stages: tl.constexpr = NUM_STAGES if WHOLE_ROW else None
    for tile in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), num_stages=row_stages):
        row = tl.cast(tile, tl.int64)
        token = row
        if token_index_ptr is not None:
            token = tl.load(token_index_ptr + row)
        label = tl.load(labels_ptr + token)
        kept = label != ignore_index
        in_range = (label >= 0) & (label < vocab_size)
        start, lead = start_of_row(row, logits_row_stride, GROUP, GROUPED)
        row_ptr = logits_ptr + start
        size = size_of_groups(lead, vocab_size, GROUP, GROUPED)
        if WHOLE_ROW:
            # An ignored row is read too: a load that waited for its label could not run ahead of the loop.
            in_row = before(size, groups, places, GROUPED)
            logits = tl.load(row_ptr + places) if EVEN else tl.load(row_ptr + places, mask=in_row, other=0.0)
        scales = (logit_scale, softcap)
        if temperature_ptr is not None:
            temperature = tl.load(temperature_ptr + token)
            scales = (tempered(logit_scale, temperature), None if softcap is None else tempered(softcap, temperature))
        # Read before the first barrier below: afterward another warp may already have overwritten them.
        label_z = transform(tl.load(row_ptr - lead + label, mask=in_range, other=0.0), scales)
        edges = None
        if GROUPED == 2:
            edges = load_edges(row_ptr, lead, size, vocab_size, scales, GROUP)
        weights = load_weights(class_weight_ptr, class_weight_sum_ptr, token_weight_ptr, token, label, vocab_size)
        if WHOLE_ROW:
            z, numerator, maximum, rounding, sums = _reduce_row(
                transform(logits, scales), places + lead, in_row, edges, class_weight_ptr, vocab_size,
                HALF, EVEN, WITH_SUM, WITH_STATS, WITH_SQUARES,
            )  # fmt: skip
        else:
            maximum, rounding, sums = _reduce_blocks(
                row_ptr, lead, size, groups, places, edges, kept, class_weight_ptr, vocab_size, scales,
                HALF, WITH_SUM, WITH_STATS, WITH_SQUARES, GROUP, GROUPED, BLOCK_SIZE, NUM_STAGES,
            )  # fmt: skip
        lse, lse_error = _store_token(
            output_ptrs, token, label, kept, label_z, maximum, rounding, sums, weights, vocab_size, label_smoothing,
            z_loss_weight,
        )  # fmt: skip
        if grad_logits_ptr is not None:
            probability_factor, label_term, smoothing_term = gradient_factors(
                grad_scale_ptr, grad_scale_stride, token, kept, lse, weights, mean_scale, vocab_size, label_smoothing,
                scales[0], z_loss_weight,
            )  # fmt: skip
            exp_factor = factor_of_exp(probability_factor, lse, lse_error, HALF)
            terms = (lse, (exp_factor, smoothing_term, None), class_weight_ptr, label_smoothing, scales)
            grad_start, _ = start_of_row(row, grad_logits_row_stride, GROUP, GROUPED)
            grad_row_ptr = grad_logits_ptr + grad_start
            if WHOLE_ROW:
                # One multiplication where comparing each column with the label would take two instructions.
                is_label_group = (numbers == (label - lead) // GROUP).to(tl.float32)
                lane_terms = tl.where(lanes == (label - lead) % GROUP, label_term, 0.0)
                factors = (probability_factor / sums[0], smoothing_term, None)
                of_numerator = (0.0, factors, class_weight_ptr, label_smoothing, scales)
                label_terms = is_label_group[:, None] * lane_terms[None, :]
                grad = gradient(numerator, z, places + lead, in_row, label_terms, of_numerator)
                grad = tl.where(kept, grad.to(grad_logits_ptr.dtype.element_ty), 0.0)
                if EVEN:
                    tl.store(grad_row_ptr + places, grad)
                else:
                    tl.store(grad_row_ptr + places, grad, mask=in_row)
            else:
                store_groups_gradient(
                    row_ptr, grad_row_ptr, lead, size, label, label_z, kept, label_term, terms, GROUP,
                    GROUPED, BLOCK_SIZE, NUM_STAGES,
                )  # fmt: skip
            if GROUPED == 2:
                store_edges(grad_row_ptr, edges, lead, label, kept, label_term, terms, HALF)


@backend.Kernel
def gradient_kernel(
    logits_ptr,  # [num_rows, num_columns]
    grad_logits_ptr,  # [num_rows, num_columns], may be logits_ptr
    token_index_ptr,  # [num_rows], the token of each row, or None if rows are the tokens in order
    labels_ptr,  # [num_tokens]
    lse_ptr,  # [num_tokens], float32, as are the next six, see GradientRows
    lse_error_ptr,
    probability_factor_ptr,  # None if factors follow from the weights below, as then the next two
    label_term_ptr,
    smoothing_term_ptr,  # or None
    entropy_factor_ptr,  # or None
    temperature_ptr,  # or None
    kept_ptr,  # [num_tokens], bool, or None if all are kept whose label is not ignore_index
    class_weight_ptr,  # [num_columns] or None
    class_weight_sum_ptr,  # [] or None
    token_weight_ptr,  # [num_tokens] or None
    grad_scale_ptr,  # [] or [num_tokens]
    strides,  # of the rows of logits and their gradient, and of grad_scale
    num_columns,
    ignore_index,
    label_smoothing,  # None if there is nothing to subtract at every class
    softcap,  # None if it is not used, as is the next; see TokenLossOptions
    logit_scale,
    z_loss_weight,
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,  # see start_of_row
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program writes the gradient of one row, which is all or a part of a token's logits."""
    logits_row_stride, grad_logits_row_stride, grad_scale_stride = strides
    row = tl.program_id(0).to(tl.int64)
    token = row
    if token_index_ptr is not None:
        token = tl.load(token_index_ptr + row)
    label = tl.load(labels_ptr + token)
    kept = label != ignore_index
    if kept_ptr is not None:
        kept = tl.load(kept_ptr + token) != 0
    lse = tl.load(lse_ptr + token)
    if probability_factor_ptr is None:
        weights = load_weights(class_weight_ptr, class_weight_sum_ptr, token_weight_ptr, token, label, num_columns)
        probability_factor, label_term, smoothing_term = gradient_factors(
            grad_scale_ptr, grad_scale_stride, token, kept, lse, weights, 1.0, num_columns, label_smoothing,
            logit_scale, z_loss_weight,
        )  # fmt: skip
    else:
        probability_factor = tl.load(probability_factor_ptr + token)
        label_term = tl.load(label_term_ptr + token)
        smoothing_term = 0.0
        if smoothing_term_ptr is not None:
            smoothing_term = tl.load(smoothing_term_ptr + token)
        if entropy_factor_ptr is not None:
            entropy_factor = tl.load(entropy_factor_ptr + token)
    scales = (logit_scale, softcap)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + token)
        scales = (tempered(logit_scale, temperature), None if softcap is None else tempered(softcap, temperature))
    HALF: tl.constexpr = logits_ptr.dtype.element_ty != tl.float32
    start, lead = start_of_row(row, logits_row_stride, GROUP, GROUPED)
    grad_start, _ = start_of_row(row, grad_logits_row_stride, GROUP, GROUPED)
    row_ptr, grad_row_ptr = logits_ptr + start, grad_logits_ptr + grad_start
    has_label = kept & (label >= 0) & (label < num_columns)
    label_z = transform(tl.load(row_ptr - lead + label, mask=has_label, other=0.0), scales)
    size = size_of_groups(lead, num_columns, GROUP, GROUPED)
    lse_error = tl.load(lse_error_ptr + token)
    factors = (factor_of_exp(probability_factor, lse, lse_error, HALF), smoothing_term, None)
    if entropy_factor_ptr is not None:
        factors = (factors[0], smoothing_term, factor_of_exp(entropy_factor, lse, lse_error, HALF))
    terms = (lse, factors, class_weight_ptr, label_smoothing, scales)
    if GROUPED == 2:
        edges = load_edges(row_ptr, lead, size, num_columns, scales, GROUP)
    tl.debug_barrier()  # before a warp overwrites what others read
    if GROUPED == 2:
        store_edges(grad_row_ptr, edges, lead, label, kept, label_term, terms, HALF)
    store_groups_gradient(
        row_ptr, grad_row_ptr, lead, size, label, label_z, kept, label_term, terms, GROUP, GROUPED,
        BLOCK_SIZE, NUM_STAGES,
    )  # fmt: skip
