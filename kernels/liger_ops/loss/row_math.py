"""Arithmetic of one row of logits that the loss and gradient kernels share."""

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
def store_row_gradient(
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
    label_z = transform(tl.load(logits_row_ptr + label, mask=has_label, other=0.0), logit_scale, softcap)
    tl.debug_barrier()  # before a warp overwrites the label's logit
    exponent = to_exponent(lse, HALF)
    probability_factor *= tl.exp(-lse_error - rounding_of(lse, exponent, HALF))
    columns = tl.arange(0, BLOCK_SIZE)
    full_end = tl.where(kept, vocab_size // BLOCK_SIZE * BLOCK_SIZE, 0)
    for start in tl.range(0, full_end, BLOCK_SIZE, num_stages=NUM_STAGES):
        logits = tl.load(logits_row_ptr + start + columns, eviction_policy="evict_first")
        z = transform(logits, logit_scale, softcap)
        grad = gradient(
            shifted_exp(z, exponent, HALF), z, start + columns, columns >= 0, class_weight_ptr, probability_factor,
            0.0, smoothing_term, label_smoothing, softcap,
        )  # fmt: skip
        grad = grad.to(grad_row_ptr.dtype.element_ty)
        tl.store(grad_row_ptr + start + columns, grad, eviction_policy="evict_first")
    # At most one more block of a kept row, every block of an ignored one.
    for start in range(full_end, vocab_size, BLOCK_SIZE):
        mask = start + columns < vocab_size
        logits = tl.load(logits_row_ptr + start + columns, mask=mask & kept, other=0.0)
        z = transform(logits, logit_scale, softcap)
        grad = gradient(
            shifted_exp(z, exponent, HALF), z, start + columns, mask, class_weight_ptr, probability_factor,
            0.0, smoothing_term, label_smoothing, softcap,
        )  # fmt: skip
        grad = tl.where(kept, grad, 0.0).to(grad_row_ptr.dtype.element_ty)
        tl.store(grad_row_ptr + start + columns, grad, mask=mask)
    _store_label_gradient(
        grad_row_ptr, shifted_exp(label_z, exponent, HALF), label_z, label, has_label, class_weight_ptr,
        probability_factor, label_term, smoothing_term, label_smoothing, softcap,
    )  # fmt: skip
