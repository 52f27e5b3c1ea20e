"""Arithmetic of one row of logits that the loss and gradient kernels share.

A thread reads and writes a group of GROUP columns at once, which only works where groups start at multiples of their
size. In rows that start or end elsewhere, as those of an odd vocabulary do, ``lead`` columns precede the first whole
group and some follow the last. These edges, fewer than two groups, are a vector of their own: every thread holds it, so
blocks of whole groups need no mask within a group.
"""

import triton
import triton.language as tl

from liger_ops.backend import tanh


@triton.jit
def transform(logits, scales):
    """Scales and soft-caps logits, in float32; both of ``scales`` may be None."""
    logit_scale, softcap = scales
    z = logits.to(tl.float32)
    if logit_scale is not None:
        z *= logit_scale
    if softcap is not None:
        z = softcap * tanh(z / softcap)
    return z


@triton.jit
def tempered(scale, temperature):
    """One of the scales of :func:`transform` for logits that are divided by a temperature."""
    return (1.0 if scale is None else scale) / temperature


@triton.jit
def start_of_row(row, row_stride, GROUP: tl.constexpr, GROUPED: tl.constexpr):
    """Where a row's first whole group starts, and how many of its columns (``lead``) precede that.

    GROUPED is 0 if groups cannot be read at once, 1 if every row starts and ends at a group, 2 if rows have edges.
    """
    start = row * row_stride
    lead = 0
    if GROUPED == 1:
        start = start // GROUP * GROUP  # which is what it is, but says so
    if GROUPED == 2:
        first_group = (start + GROUP - 1) // GROUP * GROUP
        lead = (first_group - start).to(tl.int32)
        start = first_group
    return start, lead


@triton.jit
def size_of_groups(lead, vocab_size, GROUP: tl.constexpr, GROUPED: tl.constexpr):
    """How many columns are in whole groups; all of them where there are no edges."""
    size = vocab_size
    if GROUPED > 0:
        size = tl.maximum(vocab_size - lead, 0) // GROUP * GROUP
    return size


@triton.jit
def before(end, groups, places, GROUPED: tl.constexpr):
    """Which places ``[num_groups, GROUP]`` precede ``end``, by whole groups: a finer mask would part their columns."""
    mask = places < end
    if GROUPED > 0:
        mask = tl.broadcast_to((groups < end)[:, None], places.shape)
    return mask


@triton.jit
def load_edges(row_ptr, lead, size, vocab_size, scales, GROUP: tl.constexpr):
    """A row's edges: their columns, ``[2 * GROUP]``, which of them exist, and their z (-inf elsewhere).

    Args:
        row_ptr: To the first whole group.
        lead: See :func:`start_of_row`.
        size: See :func:`size_of_groups`.
    """
    lanes = tl.arange(0, 2 * GROUP)
    is_lead = lanes < GROUP
    columns = tl.where(is_lead, lanes, lead + size + lanes - GROUP)
    in_row = (columns < vocab_size) & tl.where(is_lead, lanes < lead, True)
    z = transform(tl.load(row_ptr + columns - lead, mask=in_row, other=0.0), scales)
    return columns, in_row, tl.where(in_row, z, -float("inf"))


_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def to_exponent(shift, HALF: tl.constexpr):
    """The value that ``shifted_exp`` subtracts: ``shift``, for HALF precision logits in powers of two and rounded.

    Rounded before it meets anything else: sums are moved from one exponent to another by their difference.
    """
    return tl.fma(shift, _LOG2_E, 0.0) if HALF else shift


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
    weights,  # see load_weights
    mean_scale,
    vocab_size,
    label_smoothing,
    logit_scale,
    z_loss_weight,
):
    """Factors of a row's gradient: of its probabilities, of one at the label, and of the classes' weights."""
    label_weight, class_weight_sum, token_weight = weights
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
    label_term,  # where columns are the label, else 0
    terms,
):
    """d loss / d logits, given the ``terms`` of its row, whose factors include the upstream gradient.

    These are: lse; factors of ``probability``, of the class weights and of ``probability * (z - lse)`` (or None); the
    pointer to the class weights or None; label_smoothing; and the scales of :func:`transform`.
    """
    lse, factors, class_weight_ptr, label_smoothing, scales = terms
    probability_factor, smoothing_term, entropy_factor = factors
    softcap = scales[1]
    grad = probability * probability_factor - label_term
    if entropy_factor is not None:
        grad += tl.where(probability > 0.0, probability * (z - lse), 0.0) * entropy_factor
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
def move_excess(excess, normalizer, old_shift, new_shift):
    """sum(exp(z - old_shift) * (z - old_shift)) with ``z - new_shift`` as its last factor instead."""
    return excess + tl.where(old_shift == -float("inf"), 0.0, old_shift - new_shift) * normalizer


@triton.jit
def factor_of_exp(probability_factor, lse, lse_error, HALF: tl.constexpr):
    """``probability_factor`` for ``shifted_exp`` of lse's exponent, which is not quite the probability."""
    return probability_factor * tl.exp(-lse_error - rounding_of(lse, to_exponent(lse, HALF), HALF))


@triton.jit
def store_edges(
    grad_row_ptr,  # to the first whole group
    edges,  # see load_edges
    lead,
    label,
    kept,
    label_term,
    terms,  # see gradient, with factors of factor_of_exp
    HALF: tl.constexpr,
):
    """Writes the gradient of a row's edges, zeros if its token is ignored."""
    columns, in_row, z = edges
    probability = shifted_exp(z, to_exponent(terms[0], HALF), HALF)
    grad = gradient(probability, z, columns, in_row, tl.where(columns == label, label_term, 0.0), terms)
    grad = tl.where(kept, grad, 0.0).to(grad_row_ptr.dtype.element_ty)
    tl.store(grad_row_ptr + columns - lead, grad, mask=in_row)


@triton.jit
def store_groups_gradient(
    logits_row_ptr,  # to the first whole group, as the next
    grad_row_ptr,  # may be logits_row_ptr
    lead,  # see start_of_row
    size,  # see size_of_groups
    label,
    label_z,
    kept,
    label_term,
    terms,  # as in store_edges
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Writes d loss / d logits of a row's whole groups block by block, zeros if its token is ignored."""
    HALF: tl.constexpr = logits_row_ptr.dtype.element_ty != tl.float32
    dtype: tl.constexpr = grad_row_ptr.dtype.element_ty
    exponent, scales = to_exponent(terms[0], HALF), terms[4]
    groups = tl.arange(0, BLOCK_SIZE // GROUP) * GROUP
    places = groups[:, None] + tl.arange(0, GROUP)[None, :]
    full_size = size // BLOCK_SIZE * BLOCK_SIZE
    rest_mask = before(size, full_size + groups, full_size + places, GROUPED)
    # Asked for first, so that its latency passes during the loop.
    rest = tl.load(logits_row_ptr + full_size + places, mask=rest_mask & kept, other=0.0, eviction_policy="evict_first")
    for start in tl.range(0, tl.where(kept, full_size, 0), BLOCK_SIZE, num_stages=NUM_STAGES):
        z = transform(tl.load(logits_row_ptr + start + places, eviction_policy="evict_first"), scales)
        grad = gradient(shifted_exp(z, exponent, HALF), z, start + places + lead, places >= 0, 0.0, terms)
        tl.store(grad_row_ptr + start + places, grad.to(dtype), eviction_policy="evict_first")
    num_blocks = size // BLOCK_SIZE
    for block in range(tl.where(kept, num_blocks, 0), num_blocks):
        tl.store(grad_row_ptr + block * BLOCK_SIZE + places, tl.full(places.shape, 0.0, dtype))
    if full_size < size:
        z = transform(rest, scales)
        grad = gradient(shifted_exp(z, exponent, HALF), z, full_size + places + lead, rest_mask, 0.0, terms)
        grad = tl.where(kept, grad, 0.0).to(dtype)
        tl.store(grad_row_ptr + full_size + places, grad, mask=rest_mask, eviction_policy="evict_first")
    # The label's entry is overwritten, which is cheaper than a comparison in every column.
    has_label = kept & (label >= lead) & (label < lead + size)
    tl.debug_barrier()  # after the stores of every warp
    grad = gradient(shifted_exp(label_z, exponent, HALF), label_z, label, has_label, label_term, terms)
    tl.store(grad_row_ptr - lead + label, grad.to(dtype), mask=has_label)
