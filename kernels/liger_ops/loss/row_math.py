"""Arithmetic of one row of logits that the loss and gradient kernels share.

A thread reads and writes a group of GROUP columns at once, which only works where groups start at multiples of their
size. Rows that start elsewhere, as every second row of an odd vocabulary does, are therefore walked over from the group
in which they start: ``shift`` places of that group, and some of the last one, belong to neighbouring rows. They are
read, but not used, and never written: those two groups are written column by column.
"""

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    # The exponential form cancels near zero, where the series is exact to float32.
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0.0, -far, far))


@triton.jit
def transform(logits, logit_scale, softcap):
    z = logits.to(tl.float32)
    if logit_scale is not None:
        z *= logit_scale
    if softcap is not None:
        z = softcap * _tanh(z / softcap)
    return z


@triton.jit
def start_of_row(row, row_stride, GROUP: tl.constexpr, GROUPED: tl.constexpr):
    """Where a row's first group starts, and how many places of it (``shift``) belong to the row before.

    GROUPED is 0 if groups cannot be read at once, 1 if every row starts at a group, 2 if rows start within groups.
    """
    start = row * row_stride
    shift = 0
    if GROUPED == 2:
        shift = (start % GROUP).to(tl.int32)
    if GROUPED > 0:
        start = start // GROUP * GROUP
    return start, shift


@triton.jit
def readable(groups, shift, vocab_size, in_row, GROUPED: tl.constexpr):
    """Places ``[num_groups, GROUP]`` to read: whole groups, since a mask within them would read each column alone."""
    mask = in_row
    if GROUPED > 0:
        mask = tl.broadcast_to((groups < shift + vocab_size)[:, None], in_row.shape)
    return mask


@triton.jit
def writable(groups, shift, vocab_size, in_row, GROUP: tl.constexpr, GROUPED: tl.constexpr):
    """Places ``[num_groups, GROUP]`` to write at once: those of groups that lie in the row entirely."""
    mask = in_row
    if GROUPED > 0:
        is_whole = (groups >= shift) & (groups + GROUP <= shift + vocab_size)
        mask = tl.broadcast_to(is_whole[:, None], in_row.shape)
    return mask


@triton.jit
def blocks_of_row(shift, vocab_size, BLOCK_SIZE: tl.constexpr):
    """Start and end of the blocks that the row fills, then the first and last + 1 of two that it may fill in part.

    The latter start at 0 and at the end of the former.
    """
    end = shift + vocab_size
    full_end = end // BLOCK_SIZE * BLOCK_SIZE
    starts_late = shift > 0
    full_start = tl.where(starts_late, BLOCK_SIZE, 0)
    first_part = tl.where(starts_late & (full_end > 0), 0, 1)
    return full_start, full_end, first_part, tl.where(full_end < end, 2, 1)


_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def to_exponent(shift, HALF: tl.constexpr):
    """The value that ``shifted_exp`` subtracts: ``shift``, for HALF precision logits in powers of two and rounded."""
    return shift * _LOG2_E if HALF else shift


@triton.jit
def shifted_exp(z, exponent, HALF: tl.constexpr):
    """exp(z - shift) for shift's :func:`to_exponent`, for HALF precision logits with one instruction less."""
    return tl.exp2(z * _LOG2_E - exponent) if HALF else tl.exp(z - exponent)


@triton.jit
def rounding_of(shift, exponent, HALF: tl.constexpr):
    """The part of ``shift`` that ``exponent`` lost: exp(z - shift) is ``shifted_exp(z, exponent) * exp(-rounding)``."""
    return tl.fma(shift, _LOG2_E, -exponent) * _LN_2 if HALF else shift - exponent


@triton.jit
def load_weights(
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
def load_class_weight(class_weight_ptr, columns, mask):
    if class_weight_ptr is None:
        weight = tl.where(mask, 1.0, 0.0)
    else:
        weight = tl.load(class_weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return weight


@triton.jit
def gradient_factors(
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
    """Factors of a row's gradient: of its probabilities, of one at the label, and of the classes' weights."""
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
def gradient(
    probability,  # softmax of the transformed logits z, or, times probability_factor, a multiple of it
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
    """d loss / d logits, given factors that include the upstream gradient."""
    grad = probability * probability_factor - label_term
    if label_smoothing is not None:
        grad -= smoothing_term * load_class_weight(class_weight_ptr, columns, mask)
    if softcap is not None:
        capped = z / softcap
        grad *= 1.0 - capped * capped
    return grad


@triton.jit
def decay_of(old_shift, new_exponent, HALF: tl.constexpr):
    """The factor that moves a sum from the exponent of ``old_shift`` to ``new_exponent``; 0 for an empty sum."""
    difference = to_exponent(old_shift, HALF) - new_exponent
    return tl.exp2(difference) if HALF else tl.exp(difference)


@triton.jit
def move_excess(excess, normaliser, old_shift, new_shift):
    """sum(exp(z - old_shift) * (z - old_shift)) with ``z - new_shift`` as its last factor instead."""
    return excess + tl.where(old_shift == -float("inf"), 0.0, old_shift - new_shift) * normaliser


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
    """Overwrites the label's entry of a row's gradient, which is cheaper than a comparison in every column."""
    tl.debug_barrier()  # after the stores of every warp
    grad = gradient(
        probability, label_z, label, mask, class_weight_ptr, probability_factor, label_term, smoothing_term,
        label_smoothing, softcap,
    )  # fmt: skip
    tl.store(grad_row_ptr + label, grad.to(grad_row_ptr.dtype.element_ty), mask=mask)


@triton.jit
def factor_of_exp(probability_factor, lse, lse_error, HALF: tl.constexpr):
    """``probability_factor`` for ``shifted_exp`` of lse's exponent, which is not quite the probability."""
    return probability_factor * tl.exp(-lse_error - rounding_of(lse, to_exponent(lse, HALF), HALF))


@triton.jit
def store_edges(
    logits_row_ptr,  # to the first group of the row, as the next
    grad_row_ptr,
    shift,
    class_weight_ptr,
    label,
    kept,
    lse,
    exp_factor,  # see factor_of_exp
    label_term,
    smoothing_term,
    vocab_size,
    label_smoothing,
    softcap,
    logit_scale,
    GROUP: tl.constexpr,
):
    """Writes the gradient in the groups that a row shares with its neighbours, which :func:`writable` leaves out."""
    HALF: tl.constexpr = logits_row_ptr.dtype.element_ty != tl.float32
    end = shift + vocab_size
    last_group = end // GROUP * GROUP
    if shift + end - last_group > 0:
        lanes = tl.arange(0, 2 * GROUP)
        is_first = lanes < GROUP
        places = tl.where(is_first, lanes, last_group + lanes - GROUP)
        # A first group that is the last one as well is written once.
        mask = (places >= shift) & (places < end) & tl.where(is_first, shift > 0, (last_group > 0) | (shift == 0))
        columns = places - shift
        z = transform(tl.load(logits_row_ptr + places, mask=mask & kept, other=0.0), logit_scale, softcap)
        grad = gradient(
            shifted_exp(z, to_exponent(lse, HALF), HALF), z, columns, mask, class_weight_ptr, exp_factor,
            tl.where(columns == label, label_term, 0.0), smoothing_term, label_smoothing, softcap,
        )  # fmt: skip
        grad = tl.where(kept, grad, 0.0).to(grad_row_ptr.dtype.element_ty)
        tl.store(grad_row_ptr + places, grad, mask=mask)


@triton.jit
def store_row_gradient(
    logits_row_ptr,  # to the first group of the row, as the next
    grad_row_ptr,  # may be logits_row_ptr
    shift,  # see start_of_row
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
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Writes d loss / d logits of one row block by block, zeros if its token is ignored."""
    HALF: tl.constexpr = logits_row_ptr.dtype.element_ty != tl.float32
    has_label = kept & (label >= 0) & (label < vocab_size)
    label_z = transform(tl.load(logits_row_ptr + shift + label, mask=has_label, other=0.0), logit_scale, softcap)
    tl.debug_barrier()  # before a warp overwrites the label's logit
    exponent = to_exponent(lse, HALF)
    exp_factor = factor_of_exp(probability_factor, lse, lse_error, HALF)
    groups = tl.arange(0, BLOCK_SIZE // GROUP) * GROUP
    places = groups[:, None] + tl.arange(0, GROUP)[None, :]
    full_start, full_end, part, parts_end = blocks_of_row(shift, vocab_size, BLOCK_SIZE)
    for start in tl.range(full_start, tl.where(kept, full_end, 0), BLOCK_SIZE, num_stages=NUM_STAGES):
        logits = tl.load(logits_row_ptr + start + places, eviction_policy="evict_first")
        z = transform(logits, logit_scale, softcap)
        grad = gradient(
            shifted_exp(z, exponent, HALF), z, start + places - shift, places >= 0, class_weight_ptr, exp_factor,
            0.0, smoothing_term, label_smoothing, softcap,
        )  # fmt: skip
        grad = grad.to(grad_row_ptr.dtype.element_ty)
        tl.store(grad_row_ptr + start + places, grad, eviction_policy="evict_first")
    # The parts of a kept row that fill no block, every block of an ignored one.
    step = tl.where(kept, full_end, BLOCK_SIZE)
    parts_end = tl.where(kept, parts_end, tl.cdiv(shift + vocab_size, BLOCK_SIZE))
    for number in range(tl.where(kept, part, 0), parts_end):
        start = number * step
        columns = start + places - shift
        in_row = (columns >= 0) & (columns < vocab_size)
        mask = writable(start + groups, shift, vocab_size, in_row, GROUP, GROUPED)
        logits = tl.load(logits_row_ptr + start + places, mask=mask & kept, other=0.0)
        z = transform(logits, logit_scale, softcap)
        grad = gradient(
            shifted_exp(z, exponent, HALF), z, columns, in_row, class_weight_ptr, exp_factor,
            0.0, smoothing_term, label_smoothing, softcap,
        )  # fmt: skip
        grad = tl.where(kept, grad, 0.0).to(grad_row_ptr.dtype.element_ty)
        tl.store(grad_row_ptr + start + places, grad, mask=mask)
    if GROUPED > 0:
        store_edges(
            logits_row_ptr, grad_row_ptr, shift, class_weight_ptr, label, kept, lse, exp_factor, label_term,
            smoothing_term, vocab_size, label_smoothing, softcap, logit_scale, GROUP,
        )  # fmt: skip
    _store_label_gradient(
        grad_row_ptr + shift, shifted_exp(label_z, exponent, HALF), label_z, label, has_label, class_weight_ptr,
        exp_factor, label_term, smoothing_term, label_smoothing, softcap,
    )  # fmt: skip
