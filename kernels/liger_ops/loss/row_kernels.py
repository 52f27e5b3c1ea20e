"""Triton kernels from logits to each token's loss, statistics and gradient; the formula is in ``cross_entropy``.

A program owns whole rows. Rows up to ``MAX_ROW_IN_REGISTERS`` bytes are read once and written once. Longer ones are
read twice, block by block: so few rows are under way at a time that the second reading finds them in the L2 cache.
Within a block every thread keeps the running maximum and normaliser of its own columns (Milakov and Gimelshein,
arXiv:1805.02867), which meet only at the end of the row.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.loss.options import Targets, TokenLossOptions, TokenStats
from liger_ops.loss.token_plan import count_tokens


@dataclass(frozen=True)
class CrossEntropyLaunch:
    """How rows are walked over: block of columns, warps, blocks loaded ahead, and how many programs share the rows."""

    block_size: int
    num_warps: int
    num_programs: int
    num_stages: int = 1


_GROUP = 8  # neighbouring columns of one thread: 16 bytes in bfloat16
MAX_ROW_IN_REGISTERS = 65536  # bytes


@functools.cache
def choose_whole_row_launch(
    num_rows: int, vocab_size: int, num_multiprocessors: int, row_bytes: int, shared_bytes: int
) -> CrossEntropyLaunch:
    """Launch parameters for rows that a program holds in registers: as many programs as fill a multiprocessor.

    On an H200 in bfloat16, time over that of reading and writing every logit once: 1.09 for rows of 32768 logits with
    16 warps and two rows loaded ahead (1.56 with one, 1.14 with 8 or 32 warps), 1.12 for rows of 8192 with 4 warps.

    Args:
        num_rows: How many rows there are.
        vocab_size: Their length.
        num_multiprocessors: Of the GPU.
        row_bytes: What a program reads for one row, class weights included.
        shared_bytes: Shared memory of a program, where rows wait that are loaded ahead.
    """
    block_size = triton.next_power_of_2(max(vocab_size, 128))
    if block_size > 8192:
        num_stages = 1 + min(2, shared_bytes // row_bytes)
        return CrossEntropyLaunch(block_size, 16, min(num_rows, num_multiprocessors), num_stages)
    return CrossEntropyLaunch(
        block_size,
        num_warps=4 if block_size > 1024 else 1,
        num_programs=min(num_rows, num_multiprocessors * (32768 // max(block_size, 2048))),
    )


@functools.cache
def choose_block_launch(num_rows: int, vocab_size: int, num_multiprocessors: int) -> CrossEntropyLaunch:
    """Launch parameters for rows that are walked over in blocks: one program a multiprocessor, which fills it.

    On an H200 in bfloat16, time over that of reading and writing every logit once, rows of 131072 logits: 1.28 in
    blocks of 16384 with 32 warps (1.33 in blocks of 32768, 1.41 of 8192, 1.5 with 16 warps).
    """
    block_size = min(triton.next_power_of_2(max(vocab_size, 128)), 16384)
    num_warps = max(1, block_size // 512)
    return CrossEntropyLaunch(block_size, num_warps, min(num_rows, 2 * num_multiprocessors))


@functools.cache
def choose_gradient_launch(num_rows: int, vocab_size: int) -> CrossEntropyLaunch:
    """Launch parameters for a gradient of its own: one row a program, as many programs at a time as fit."""
    block_size = min(triton.next_power_of_2(max(vocab_size, 128)), 4096)
    return CrossEntropyLaunch(block_size, num_warps=max(1, block_size // 1024), num_programs=num_rows)


@triton.jit
def _tanh(x):
    # The exponential form cancels near zero, where the series is exact to float32.
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _transform(logits, logit_scale, softcap):
    z = logits.to(tl.float32)
    if logit_scale is not None:
        z *= logit_scale
    if softcap is not None:
        z = softcap * _tanh(z / softcap)
    return z


_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _exponent(shift, HALF: tl.constexpr):
    """What :func:`_exp` takes away: ``shift``, for HALF precision logits in powers of two and rounded."""
    return shift * _LOG2_E if HALF else shift


@triton.jit
def _exp(z, exponent, HALF: tl.constexpr):
    """exp(z - shift) for shift's :func:`_exponent`, for HALF precision logits with one instruction less."""
    return tl.exp2(z * _LOG2_E - exponent) if HALF else tl.exp(z - exponent)


@triton.jit
def _rounding(shift, exponent, HALF: tl.constexpr):
    """What is missing in ``exponent``: exp(z - shift) is ``_exp(z, exponent) * exp(-_rounding(shift, exponent))``."""
    return tl.fma(shift, _LOG2_E, -exponent) * _LN_2 if HALF else shift - exponent


@triton.jit
def _load_weights(
    class_weight_ptr,  # [vocab_size] or None
    class_weight_sum_ptr,  # [] or None
    token_weight_ptr,  # [num_tokens] or None
    token,
    label,
    vocab_size,
):
    """The label's weight (NaN when the label is no class), the sum of all classes' and the token's."""
    in_range = (label >= 0) & (label < vocab_size)
    label_weight = 1.0
    class_weight_sum = 1.0 * vocab_size  # no method call: the compiler makes a vocab_size of 1 a plain int
    token_weight = 1.0
    if class_weight_ptr is not None:
        label_weight = tl.load(class_weight_ptr + label, mask=in_range, other=0.0).to(tl.float32)
        class_weight_sum = tl.load(class_weight_sum_ptr).to(tl.float32)
    if token_weight_ptr is not None:
        token_weight = tl.load(token_weight_ptr + token).to(tl.float32)
    return tl.where(in_range, label_weight, float("nan")), class_weight_sum, token_weight


@triton.jit
def _load_class_weight(class_weight_ptr, columns, mask):
    if class_weight_ptr is None:
        weight = tl.where(mask, 1.0, 0.0)
    else:
        weight = tl.load(class_weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return weight


@triton.jit
def _gradient_factors(
    grad_scale_ptr,  # [] or [num_tokens], or None for 1
    grad_scale_stride,
    token,
    kept,
    lse,
    label_weight,
    class_weight_sum,
    token_weight,
    mean_scale,
    vocab_size,
    label_smoothing,
    logit_scale,
    z_loss_weight,
):
    """What multiplies a row's probabilities, and what is taken away at the label, and at every class by its weight."""
    factor = token_weight * mean_scale
    if logit_scale is not None:
        factor *= logit_scale
    if grad_scale_ptr is not None:
        factor *= tl.load(grad_scale_ptr + token * grad_scale_stride).to(tl.float32)
    smoothing = 0.0
    if label_smoothing is not None:
        smoothing = label_smoothing / vocab_size
        label_weight = (1.0 - label_smoothing) * label_weight
    probability_factor = label_weight + smoothing * class_weight_sum + 2.0 * z_loss_weight * lse
    return tl.where(kept, probability_factor * factor, 0.0), label_weight * factor, smoothing * factor


@triton.jit
def _gradient(
    probability,  # of columns: softmax of the transformed logits z, or what probability_factor makes that
    z,
    columns,
    mask,
    class_weight_ptr,  # [vocab_size] or None
    probability_factor,
    label_term,  # where columns are the label, else 0
    smoothing_term,
    label_smoothing,
    softcap,
):
    """d loss / d logits, given factors that hold the upstream gradient already."""
    grad = probability * probability_factor - label_term
    if label_smoothing is not None:
        grad -= smoothing_term * _load_class_weight(class_weight_ptr, columns, mask)
    if softcap is not None:
        capped = z / softcap
        grad *= 1.0 - capped * capped
    return grad


@triton.jit
def _store_token(
    losses_ptr,  # [num_tokens], float32, as are lse, lse_error, log_probabilities and entropy
    lse_ptr,
    lse_error_ptr,
    log_probabilities_ptr,  # or None, as the next three
    entropy_ptr,
    predictions_ptr,  # [num_tokens], int64
    correct_ptr,  # [num_tokens], bool
    token,
    label,
    kept,
    label_z,
    maximum,
    normaliser,  # sum(exp(z - maximum)), times exp(rounding)
    rounding,
    weighted_sum,
    expected_excess,  # sum(exp(z - maximum) * (z - maximum)), times exp(rounding)
    prediction,
    label_weight,
    class_weight_sum,
    token_weight,
    vocab_size,
    label_smoothing,
    z_loss_weight,
):
    """Writes what is known of one token, zeros if it is ignored; returns its lse and the lse's rounding error."""
    log_normaliser = tl.log(normaliser) - rounding
    lse = maximum + log_normaliser
    # Exact, since the summand of larger magnitude is taken away first.
    maximum_is_larger = tl.abs(maximum) >= tl.abs(log_normaliser)
    larger = tl.where(maximum_is_larger, maximum, log_normaliser)
    lse_error = tl.where(maximum_is_larger, log_normaliser, maximum) - (lse - larger)
    log_probability = label_z - lse - lse_error
    loss = -label_weight * log_probability
    if label_smoothing is not None:
        spread = class_weight_sum * lse - weighted_sum
        loss = (1.0 - label_smoothing) * loss + label_smoothing / vocab_size * spread
    loss = (loss + z_loss_weight * lse * lse) * token_weight
    tl.store(losses_ptr + token, tl.where(kept, loss, 0.0))
    if lse_ptr is not None:
        tl.store(lse_ptr + token, tl.where(kept, lse, 0.0))
    if lse_error_ptr is not None:
        tl.store(lse_error_ptr + token, tl.where(kept, lse_error, 0.0))
    if predictions_ptr is not None:
        nan_unless_class = tl.where((label >= 0) & (label < vocab_size), 0.0, float("nan"))
        tl.store(log_probabilities_ptr + token, tl.where(kept, log_probability + nan_unless_class, 0.0))
        tl.store(entropy_ptr + token, tl.where(kept, log_normaliser - expected_excess / normaliser, 0.0))
        tl.store(predictions_ptr + token, tl.where(kept, prediction.to(tl.int64), label))
        tl.store(correct_ptr + token, kept & (prediction == label))
    return lse, lse_error


@triton.jit
def _mean_scale(labels_ptr, class_weight_ptr, token_weight_ptr, mean_scale_ptr, num_tokens, vocab_size, ignore_index):
    """1 / the summed weight of all tokens, which the first program writes down; 1 if nobody asks."""
    mean_scale = 1.0
    if mean_scale_ptr is not None:
        _, mean_scale = count_tokens(
            labels_ptr, class_weight_ptr, token_weight_ptr, num_tokens, vocab_size, ignore_index, 1024
        )
        if tl.program_id(0) == 0:
            tl.store(mean_scale_ptr, mean_scale)
    return mean_scale


@triton.jit
def _sum(values):
    return tl.sum(tl.sum(values, axis=1), axis=0)


@backend.Kernel
def _whole_row_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    grad_logits_ptr,  # [num_rows, vocab_size], may be logits_ptr
    token_index_ptr,  # [num_rows], which token a row is, or None for its number
    labels_ptr,  # [num_tokens]
    class_weight_ptr,  # [vocab_size] or None
    class_weight_sum_ptr,  # [] or None
    token_weight_ptr,  # [num_tokens] or None
    grad_scale_ptr,  # [] or [num_tokens], or None
    mean_scale_ptr,  # [], float32, or None; written, and a factor of the gradient
    losses_ptr,  # [num_tokens], as are the rest; see _store_token
    lse_ptr,
    lse_error_ptr,
    log_probabilities_ptr,
    entropy_ptr,
    predictions_ptr,
    correct_ptr,
    logits_row_stride,
    grad_logits_row_stride,
    grad_scale_stride,
    num_rows,
    vocab_size,
    ignore_index,
    label_smoothing,  # None for none, as the next two; see TokenLossOptions
    softcap,
    logit_scale,
    z_loss_weight,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program turns every num_programs-th row of logits into its loss and gradient, reading it once."""
    HALF: tl.constexpr = logits_ptr.dtype.element_ty != tl.float32
    mean_scale = _mean_scale(
        labels_ptr, class_weight_ptr, token_weight_ptr, mean_scale_ptr, num_rows, vocab_size, ignore_index
    )
    groups, lanes = tl.arange(0, BLOCK_SIZE // GROUP), tl.arange(0, GROUP)
    columns = groups[:, None] * GROUP + lanes[None, :]
    in_row = columns < vocab_size
    for tile in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), num_stages=NUM_STAGES):
        row = tl.cast(tile, tl.int64)
        token = row
        if token_index_ptr is not None:
            token = tl.load(token_index_ptr + row)
        label = tl.load(labels_ptr + token)
        kept = label != ignore_index
        in_range = (label >= 0) & (label < vocab_size)
        row_ptr = logits_ptr + row * logits_row_stride
        # An ignored row is read too: a load that waited for its label could not run ahead of the loop.
        logits = tl.load(row_ptr + columns, mask=None if EVEN else in_row, other=None if EVEN else 0.0)
        # Read before the first barrier below: afterwards another warp may already have overwritten the label's logit.
        label_z = _transform(tl.load(row_ptr + label, mask=in_range, other=0.0), logit_scale, softcap)
        label_weight, class_weight_sum, token_weight = _load_weights(
            class_weight_ptr, class_weight_sum_ptr, token_weight_ptr, token, label, vocab_size
        )
        z = _transform(logits, logit_scale, softcap)
        weighted_sum = 0.0
        if label_smoothing is not None:
            weighted_sum = _sum(z * _load_class_weight(class_weight_ptr, columns, in_row))
        if not EVEN:
            z = tl.where(in_row, z, -float("inf"))
        maximum = tl.max(tl.max(z, axis=1), axis=0)
        # While every logit is -inf, subtracting their maximum would give NaN where nothing is known.
        shift = tl.where(maximum == -float("inf"), 0.0, maximum)
        exponent = _exponent(shift, HALF)
        numerator = _exp(z, exponent, HALF)
        normaliser = _sum(numerator)
        expected_excess = 0.0
        prediction = 0
        if predictions_ptr is not None:
            expected_excess = _sum(tl.where(numerator > 0.0, numerator * (z - shift), 0.0))
            prediction = tl.min(tl.min(tl.where(z == maximum, columns, vocab_size - 1), axis=1), axis=0)
        lse, _ = _store_token(
            losses_ptr, lse_ptr, lse_error_ptr, log_probabilities_ptr, entropy_ptr, predictions_ptr, correct_ptr,
            token, label, kept, label_z, maximum, normaliser, _rounding(shift, exponent, HALF), weighted_sum,
            expected_excess, prediction, label_weight, class_weight_sum, token_weight, vocab_size, label_smoothing,
            z_loss_weight,
        )  # fmt: skip
        probability_factor, label_term, smoothing_term = _gradient_factors(
            grad_scale_ptr, grad_scale_stride, token, kept, lse, label_weight, class_weight_sum, token_weight,
            mean_scale, vocab_size, label_smoothing, logit_scale, z_loss_weight,
        )  # fmt: skip
        # One multiplication where comparing each column with the label would take two instructions.
        is_label_group = (groups == label // GROUP).to(tl.float32)
        label_terms = is_label_group[:, None] * tl.where(lanes == label % GROUP, label_term, 0.0)[None, :]
        grad = _gradient(
            numerator, z, columns, in_row, class_weight_ptr, probability_factor / normaliser, label_terms,
            smoothing_term, label_smoothing, softcap,
        )  # fmt: skip
        grad = tl.where(kept, grad.to(grad_logits_ptr.dtype.element_ty), 0.0)
        tl.store(grad_logits_ptr + row * grad_logits_row_stride + columns, grad, mask=None if EVEN else in_row)


@triton.jit
def _store_label_gradient(
    grad_row_ptr,  # [vocab_size]
    probability,
    label_z,
    label,
    mask,
    class_weight_ptr,
    probability_factor,
    label_term,
    smoothing_term,
    label_smoothing,
    softcap,
):
    """Overwrites the one entry of a row's gradient that differs, which is cheaper than asking for it everywhere."""
    tl.debug_barrier()  # after the stores of every warp
    grad = _gradient(
        probability, label_z, label, mask, class_weight_ptr, probability_factor, label_term, smoothing_term,
        label_smoothing, softcap,
    )  # fmt: skip
    tl.store(grad_row_ptr + label, grad.to(grad_row_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _decay(old_shift, new_exponent, HALF: tl.constexpr):
    """The factor of a sum that was taken with the exponent of ``old_shift``; 0 for one of nothing."""
    difference = _exponent(old_shift, HALF) - new_exponent
    return tl.exp2(difference) if HALF else tl.exp(difference)


@triton.jit
def _move_excess(excess, normaliser, old_shift, new_shift):
    """sum(exp(z - old_shift) * (z - old_shift)) with the last difference to ``new_shift`` instead."""
    return excess + tl.where(old_shift == -float("inf"), 0.0, old_shift - new_shift) * normaliser


@triton.jit
def _absorb_block(
    z,  # [num_groups, GROUP], -inf past the row's end
    columns,  # like z
    mask,  # like z
    start,
    class_weight_ptr,
    maximum,  # [num_groups], as are the rest
    normaliser,
    weighted_sum,
    expected_excess,
    best_start,
    label_smoothing,
    HALF: tl.constexpr,
    WITH_STATS: tl.constexpr,
):
    """Adds one block of a row to the running state of each group of columns."""
    block_maximum = tl.max(z, axis=1)
    new_maximum = tl.maximum(maximum, block_maximum)
    # While every logit so far is -inf, subtracting their maximum would give NaN.
    shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    exponent = _exponent(shift, HALF)
    decay = _decay(maximum, exponent, HALF)
    numerator = _exp(z, exponent[:, None], HALF)
    seen = normaliser
    normaliser = normaliser * decay + tl.sum(numerator, axis=1)
    if label_smoothing is not None:
        weight = _load_class_weight(class_weight_ptr, columns, mask)
        weighted_sum += tl.sum(tl.where(mask, weight * z, 0.0), axis=1)
    if WITH_STATS:
        excess = tl.sum(tl.where(numerator > 0.0, numerator * (z - shift[:, None]), 0.0), axis=1)
        expected_excess = _move_excess(expected_excess, seen, maximum, shift) * decay + excess
        best_start = tl.where(block_maximum > maximum, start, best_start)
    return new_maximum, normaliser, weighted_sum, expected_excess, best_start


@triton.jit
def _store_row_gradient(
    logits_row_ptr,  # [vocab_size]
    grad_row_ptr,  # [vocab_size], may be logits_row_ptr
    class_weight_ptr,
    label,
    kept,
    lse,
    lse_error,
    probability_factor,
    label_term,
    smoothing_term,
    vocab_size,
    label_smoothing,
    softcap,
    logit_scale,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Writes d loss / d logits of one row block by block, zeros if its token is ignored."""
    HALF: tl.constexpr = logits_row_ptr.dtype.element_ty != tl.float32
    has_label = kept & (label >= 0) & (label < vocab_size)
    label_z = _transform(tl.load(logits_row_ptr + label, mask=has_label, other=0.0), logit_scale, softcap)
    tl.debug_barrier()  # before a warp overwrites the label's logit
    exponent = _exponent(lse, HALF)
    probability_factor *= tl.exp(-lse_error - _rounding(lse, exponent, HALF))
    columns = tl.arange(0, BLOCK_SIZE)
    full_end = tl.where(kept, vocab_size // BLOCK_SIZE * BLOCK_SIZE, 0)
    for start in tl.range(0, full_end, BLOCK_SIZE, num_stages=NUM_STAGES):
        logits = tl.load(logits_row_ptr + start + columns, eviction_policy="evict_first")
        z = _transform(logits, logit_scale, softcap)
        grad = _gradient(
            _exp(z, exponent, HALF), z, start + columns, columns >= 0, class_weight_ptr, probability_factor,
            0.0, smoothing_term, label_smoothing, softcap,
        )  # fmt: skip
        grad = grad.to(grad_row_ptr.dtype.element_ty)
        tl.store(grad_row_ptr + start + columns, grad, eviction_policy="evict_first")
    # At most one more block of a kept row, every block of an ignored one.
    for start in range(full_end, vocab_size, BLOCK_SIZE):
        mask = start + columns < vocab_size
        logits = tl.load(logits_row_ptr + start + columns, mask=mask & kept, other=0.0)
        z = _transform(logits, logit_scale, softcap)
        grad = _gradient(
            _exp(z, exponent, HALF), z, start + columns, mask, class_weight_ptr, probability_factor,
            0.0, smoothing_term, label_smoothing, softcap,
        )  # fmt: skip
        grad = tl.where(kept, grad, 0.0).to(grad_row_ptr.dtype.element_ty)
        tl.store(grad_row_ptr + start + columns, grad, mask=mask)
    _store_label_gradient(
        grad_row_ptr, _exp(label_z, exponent, HALF), label_z, label, has_label, class_weight_ptr,
        probability_factor, label_term, smoothing_term, label_smoothing, softcap,
    )  # fmt: skip


@backend.Kernel
def _blockwise_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    grad_logits_ptr,  # [num_rows, vocab_size], may be logits_ptr; None for no gradient
    token_index_ptr,  # [num_rows], which token a row is, or None for its number
    labels_ptr,  # [num_tokens]
    class_weight_ptr,  # [vocab_size] or None
    class_weight_sum_ptr,  # [] or None
    token_weight_ptr,  # [num_tokens] or None
    grad_scale_ptr,  # [] or [num_tokens], or None
    mean_scale_ptr,  # [], float32, or None; written, and a factor of the gradient
    losses_ptr,  # [num_tokens], as are the rest; see _store_token
    lse_ptr,
    lse_error_ptr,
    log_probabilities_ptr,
    entropy_ptr,
    predictions_ptr,
    correct_ptr,
    logits_row_stride,
    grad_logits_row_stride,
    grad_scale_stride,
    num_rows,
    vocab_size,
    ignore_index,
    label_smoothing,  # None for none, as the next two; see TokenLossOptions
    softcap,
    logit_scale,
    z_loss_weight,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes the loss of every num_programs-th row and, on request, turns the row into its gradient."""
    HALF: tl.constexpr = logits_ptr.dtype.element_ty != tl.float32
    mean_scale = _mean_scale(
        labels_ptr, class_weight_ptr, token_weight_ptr, mean_scale_ptr, num_rows, vocab_size, ignore_index
    )
    WITH_STATS: tl.constexpr = predictions_ptr is not None
    num_groups: tl.constexpr = BLOCK_SIZE // GROUP
    columns = tl.arange(0, num_groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    for tile in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(tile, tl.int64)
        token = row
        if token_index_ptr is not None:
            token = tl.load(token_index_ptr + row)
        label = tl.load(labels_ptr + token)
        kept = label != ignore_index
        in_range = (label >= 0) & (label < vocab_size)
        row_ptr = logits_ptr + row * logits_row_stride
        label_z = _transform(tl.load(row_ptr + label, mask=in_range, other=0.0), logit_scale, softcap)
        label_weight, class_weight_sum, token_weight = _load_weights(
            class_weight_ptr, class_weight_sum_ptr, token_weight_ptr, token, label, vocab_size
        )

        maxima = tl.full([num_groups], -float("inf"), dtype=tl.float32)
        normalisers = tl.zeros([num_groups], dtype=tl.float32)
        weighted_sums = tl.zeros([num_groups], dtype=tl.float32)
        expected = tl.zeros([num_groups], dtype=tl.float32)
        best_starts = tl.zeros([num_groups], dtype=tl.int32)
        full_end = tl.where(kept, vocab_size // BLOCK_SIZE * BLOCK_SIZE, 0)
        for start in tl.range(0, full_end, BLOCK_SIZE, num_stages=NUM_STAGES):
            logits = tl.load(row_ptr + start + columns, eviction_policy="evict_last")
            maxima, normalisers, weighted_sums, expected, best_starts = _absorb_block(
                _transform(logits, logit_scale, softcap), start + columns, columns >= 0, start, class_weight_ptr,
                maxima, normalisers, weighted_sums, expected, best_starts, label_smoothing, HALF, WITH_STATS,
            )  # fmt: skip
        if kept & (full_end < vocab_size):
            mask = full_end + columns < vocab_size
            logits = tl.load(row_ptr + full_end + columns, mask=mask, other=0.0)
            z = tl.where(mask, _transform(logits, logit_scale, softcap), -float("inf"))
            maxima, normalisers, weighted_sums, expected, best_starts = _absorb_block(
                z, full_end + columns, mask, full_end, class_weight_ptr,
                maxima, normalisers, weighted_sums, expected, best_starts, label_smoothing, HALF, WITH_STATS,
            )  # fmt: skip
        maximum = tl.max(maxima, axis=0)
        shift = tl.where(maximum == -float("inf"), 0.0, maximum)
        exponent = _exponent(shift, HALF)
        decay = _decay(maxima, exponent, HALF)
        normaliser = tl.sum(normalisers * decay, axis=0)
        expected_excess = 0.0
        prediction = 0
        if WITH_STATS:
            excess = _move_excess(expected, normalisers, maxima, shift)
            expected_excess = tl.sum(excess * decay, axis=0)
            # Looking for the largest logit's place once, where each group had its own, is cheaper than in every block.
            best_columns = best_starts[:, None] + columns
            mask = kept & (best_columns < vocab_size) & (maxima == maximum)[:, None]
            z = _transform(tl.load(row_ptr + best_columns, mask=mask, other=0.0), logit_scale, softcap)
            candidates = tl.where(mask & (z == maximum), best_columns, vocab_size - 1)
            prediction = tl.min(tl.min(candidates, axis=1), axis=0)
        lse, lse_error = _store_token(
            losses_ptr, lse_ptr, lse_error_ptr, log_probabilities_ptr, entropy_ptr, predictions_ptr, correct_ptr,
            token, label, kept, label_z, maximum, normaliser, _rounding(shift, exponent, HALF),
            tl.sum(weighted_sums, axis=0), expected_excess, prediction, label_weight, class_weight_sum, token_weight,
            vocab_size, label_smoothing, z_loss_weight,
        )  # fmt: skip
        if grad_logits_ptr is not None:
            probability_factor, label_term, smoothing_term = _gradient_factors(
                grad_scale_ptr, grad_scale_stride, token, kept, lse, label_weight, class_weight_sum, token_weight,
                mean_scale, vocab_size, label_smoothing, logit_scale, z_loss_weight,
            )  # fmt: skip
            _store_row_gradient(
                row_ptr, grad_logits_ptr + row * grad_logits_row_stride, class_weight_ptr, label, kept, lse, lse_error,
                probability_factor, label_term, smoothing_term, vocab_size, label_smoothing, softcap, logit_scale,
                BLOCK_SIZE, NUM_STAGES,
            )  # fmt: skip


@backend.Kernel
def _gradient_kernel(
    logits_ptr,  # [num_tokens, vocab_size]
    grad_logits_ptr,  # [num_tokens, vocab_size], may be logits_ptr
    labels_ptr,  # [num_tokens]
    class_weight_ptr,  # [vocab_size] or None
    class_weight_sum_ptr,  # [] or None
    token_weight_ptr,  # [num_tokens] or None
    grad_scale_ptr,  # [] or [num_tokens]
    lse_ptr,  # [num_tokens], float32
    lse_error_ptr,  # [num_tokens], float32
    logits_row_stride,
    grad_logits_row_stride,
    grad_scale_stride,
    vocab_size,
    ignore_index,
    label_smoothing,  # None for none, as the next two; see TokenLossOptions
    softcap,
    logit_scale,
    z_loss_weight,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program writes the gradient of one token's logits, whose lse is known."""
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + token)
    kept = label != ignore_index
    lse = tl.load(lse_ptr + token)
    label_weight, class_weight_sum, token_weight = _load_weights(
        class_weight_ptr, class_weight_sum_ptr, token_weight_ptr, token, label, vocab_size
    )
    probability_factor, label_term, smoothing_term = _gradient_factors(
        grad_scale_ptr, grad_scale_stride, token, kept, lse, label_weight, class_weight_sum, token_weight, 1.0,
        vocab_size, label_smoothing, logit_scale, z_loss_weight,
    )  # fmt: skip
    _store_row_gradient(
        logits_ptr + token * logits_row_stride, grad_logits_ptr + token * grad_logits_row_stride, class_weight_ptr,
        label, kept, lse, tl.load(lse_error_ptr + token), probability_factor, label_term, smoothing_term, vocab_size,
        label_smoothing, softcap, logit_scale, BLOCK_SIZE, NUM_STAGES,
    )  # fmt: skip


class GradientRows(NamedTuple):
    """What the gradient of some rows of logits is made of, with every factor in it; see :func:`_gradient_factors`.

    ``[num_rows]`` each, contiguous.
    """

    labels: Tensor
    """int64, the column of the label, -1 where it is none of the row's."""
    kept: Tensor
    """bool, False for rows whose gradient is zero."""
    lse: Tensor
    """At least float32, as are the rest."""
    lse_error: Tensor
    of_probability: Tensor
    """What multiplies the probabilities."""
    of_label: Tensor
    """What is taken away at the label."""
    of_weight: Tensor
    """What is taken away at every class, times the class's weight."""


@backend.Kernel
def _shard_gradient_kernel(
    logits_ptr,  # [num_rows, num_columns], turned into its gradient
    labels_ptr,  # [num_rows], as are the following; see GradientRows
    kept_ptr,
    lse_ptr,
    lse_error_ptr,
    of_probability_ptr,
    of_label_ptr,
    of_weight_ptr,
    class_weight_ptr,  # [num_columns] or None
    logits_row_stride,
    num_columns,
    label_smoothing,  # None for none, as the next two; see TokenLossOptions
    softcap,
    logit_scale,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program writes the gradient of one row, which is a part of a token's logits."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_row_stride
    _store_row_gradient(
        row_ptr, row_ptr, class_weight_ptr, tl.load(labels_ptr + row), tl.load(kept_ptr + row) != 0,
        tl.load(lse_ptr + row), tl.load(lse_error_ptr + row), tl.load(of_probability_ptr + row),
        tl.load(of_label_ptr + row), tl.load(of_weight_ptr + row), num_columns, label_smoothing, softcap, logit_scale,
        BLOCK_SIZE, NUM_STAGES,
    )  # fmt: skip


def _shared_arguments(
    logits: Tensor, grad_logits: Tensor | None, targets: Targets, grad_scale: Tensor | None, options: TokenLossOptions
) -> dict[str, Any]:
    """What all three kernels are launched with."""
    labels, class_weight, token_weight = targets
    return {
        "logits_ptr": logits,
        "grad_logits_ptr": grad_logits,
        "labels_ptr": labels,
        "class_weight_ptr": class_weight,
        "class_weight_sum_ptr": None if class_weight is None else class_weight.sum(dtype=torch.float32),
        "token_weight_ptr": token_weight,
        "grad_scale_ptr": grad_scale,
        "logits_row_stride": logits.stride(0),
        "grad_logits_row_stride": 0 if grad_logits is None else grad_logits.stride(0),
        "grad_scale_stride": grad_scale.stride(0) if grad_scale is not None and grad_scale.dim() else 0,
        "vocab_size": logits.shape[1],
        "ignore_index": options.ignore_index,
        "label_smoothing": options.label_smoothing or None,
        "softcap": options.softcap,
        "logit_scale": None if options.logit_scale == 1.0 else options.logit_scale,
        "z_loss_weight": options.z_loss_weight,
    }


def launch_loss(
    logits: Tensor,
    targets: Targets,
    grad_scale: Tensor | None,
    options: TokenLossOptions,
    *,
    losses: Tensor,
    mean_scale: Tensor | None = None,
    lse: Tensor | None = None,
    lse_error: Tensor | None = None,
    stats: TokenStats | None = None,
    grad_logits: Tensor | None = None,
    token_index: Tensor | None = None,
) -> None:
    """Computes each row's loss and what else there is room for.

    Args:
        logits: ``[num_rows, vocab_size]``, unit stride in the last dimension.
        targets: Labels and weights, ``[num_tokens]``, contiguous.
        grad_scale: Factor of the gradient, ``[]`` or ``[num_tokens]``; None for 1.
        options: What the loss is made of.
        losses: Room for the losses, ``[num_tokens]``, float32.
        mean_scale: Room for the factor that makes their sum a mean, ``[]``, float32, which then is a factor of the
            gradient too; only where rows are all tokens.
        lse: Room for log-sum-exp, float32. Taken from ``stats`` where there are any.
        lse_error: Room for what rounding took from ``lse``, float32.
        stats: Room for the rest.
        grad_logits: Room for the gradient of ``sum(losses * grad_scale)``, ``logits``' shape; may be ``logits``.
        token_index: Which token each row is, ``[num_rows]``, int64; None if rows are all tokens in order.
    """
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        if mean_scale is not None:
            mean_scale.zero_()
        return
    num_multiprocessors = backend.num_multiprocessors(logits.device)
    arguments = {
        **_shared_arguments(logits, grad_logits, targets, grad_scale, options),
        "token_index_ptr": token_index,
        "mean_scale_ptr": mean_scale,
        "losses_ptr": losses,
        "lse_ptr": lse if stats is None else stats.lse,
        "lse_error_ptr": lse_error,
        "log_probabilities_ptr": None if stats is None else stats.log_probabilities,
        "entropy_ptr": None if stats is None else stats.entropy,
        "predictions_ptr": None if stats is None else stats.predictions,
        "correct_ptr": None if stats is None else stats.correct,
        "num_rows": num_rows,
    }
    row_bytes = vocab_size * logits.element_size()
    if grad_logits is not None and row_bytes <= MAX_ROW_IN_REGISTERS:
        block_bytes = triton.next_power_of_2(row_bytes)
        if targets.class_weight is not None:
            block_bytes += 2 * triton.next_power_of_2(vocab_size) * targets.class_weight.element_size()
        shared_bytes = backend.shared_memory(logits.device)
        launch = choose_whole_row_launch(num_rows, vocab_size, num_multiprocessors, block_bytes, shared_bytes)
        kernel, extra = _whole_row_kernel, {"EVEN": vocab_size == launch.block_size, "GROUP": _GROUP}
    else:
        launch = choose_block_launch(num_rows, vocab_size, num_multiprocessors)
        kernel, extra = _blockwise_kernel, {"GROUP": _GROUP}
    kernel.launch(
        launch.num_programs,
        **arguments,
        **extra,
        BLOCK_SIZE=launch.block_size,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
    )


def launch_gradient(
    logits: Tensor,
    targets: Targets,
    grad_scale: Tensor,
    options: TokenLossOptions,
    *,
    lse: Tensor,
    lse_error: Tensor,
    grad_logits: Tensor,
) -> None:
    """Writes the gradient of ``sum(losses * grad_scale)`` to ``grad_logits``; arguments as in :func:`launch_loss`."""
    num_tokens, vocab_size = logits.shape
    if num_tokens == 0:
        return
    launch = choose_gradient_launch(num_tokens, vocab_size)
    _gradient_kernel.launch(
        launch.num_programs,
        **_shared_arguments(logits, grad_logits, targets, grad_scale, options),
        lse_ptr=lse,
        lse_error_ptr=lse_error,
        BLOCK_SIZE=launch.block_size,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
    )


def launch_shard_gradient(
    logits: Tensor, rows: GradientRows, class_weight: Tensor | None, options: TokenLossOptions
) -> None:
    """Overwrites some columns of logits with their gradient.

    Args:
        logits: ``[num_rows, num_columns]``, unit stride in the last dimension.
        rows: What is known of each.
        class_weight: Of these columns, ``[num_columns]``, or None.
        options: What the loss is made of.
    """
    num_rows, num_columns = logits.shape
    if logits.numel() == 0:
        return
    launch = choose_gradient_launch(num_rows, num_columns)
    _shard_gradient_kernel.launch(
        launch.num_programs,
        logits_ptr=logits,
        **{f"{name}_ptr": tensor for name, tensor in rows._asdict().items()},
        class_weight_ptr=class_weight,
        logits_row_stride=logits.stride(0),
        num_columns=num_columns,
        label_smoothing=options.label_smoothing or None,
        softcap=options.softcap,
        logit_scale=None if options.logit_scale == 1.0 else options.logit_scale,
        BLOCK_SIZE=launch.block_size,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
    )
