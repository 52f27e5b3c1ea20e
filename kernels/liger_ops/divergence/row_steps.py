"""The steps of one row of two models' logits, which the divergence kernels are made of; formulas are in ``rows``.

A program walks over a row two or three times, each time in the direction opposite to the last, so that what it read
last, and is still in the L2 cache, is read first. Within a block every thread keeps the running sums of the columns
that it loads (Milakov and Gimelshein, arXiv:1805.02867), merged only at the end of the row.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from liger_ops.loss.row_math import decay_of, rounding_of, shifted_exp, to_exponent, transform

KIND_NUMBERS = {
    "forward_kl": 0,
    "reverse_kl": 1,
    "mixed": 2,
    "jsd": 3,
    "skew_kl": 4,
    "skew_reverse_kl": 5,
    "total_variation": 6,
    "mse": 7,
    "cosine": 8,
}
FORWARD_KL = tl.constexpr(0)
REVERSE_KL = tl.constexpr(1)
MIXED = tl.constexpr(2)
JSD = tl.constexpr(3)
SKEW_KL = tl.constexpr(4)
SKEW_REVERSE_KL = tl.constexpr(5)
TOTAL_VARIATION = tl.constexpr(6)
MSE = tl.constexpr(7)
COSINE = tl.constexpr(8)
_CLAMP = tl.constexpr(80.0)
_LOG2_E = tl.constexpr(1.4426950408889634)
_SMALLEST_DECAY = tl.constexpr(1e-37)  # an infinite sum stays infinite, though its summands have underflown


@triton.jit
def _load_pair(
    student_row_ptr,
    teacher_row_ptr,
    columns,
    mask,  # or None
    student_scale,
    student_softcap,
    teacher_scale,
    teacher_softcap,
    KIND: tl.constexpr,
):
    """Tempered logits of both; outside of the row -inf, or 0 for kinds that compare logits."""
    if mask is None:
        z_s = transform(tl.load(student_row_ptr + columns), student_scale, student_softcap)
        z_t = transform(tl.load(teacher_row_ptr + columns), teacher_scale, teacher_softcap)
    else:
        z_s = transform(tl.load(student_row_ptr + columns, mask=mask, other=0.0), student_scale, student_softcap)
        z_t = transform(tl.load(teacher_row_ptr + columns, mask=mask, other=0.0), teacher_scale, teacher_softcap)
        if KIND < MSE:
            z_s, z_t = tl.where(mask, z_s, -float("inf")), tl.where(mask, z_t, -float("inf"))
    return z_s, z_t


@triton.jit
def _log(x, FAST: tl.constexpr):
    """Logarithm of a normal number, for FAST to 2e-7 by one instruction where the exact one takes 26."""
    return libdevice.fast_logf(x) if FAST else tl.log(x)


@triton.jit
def _divide(x, y, FAST: tl.constexpr):
    """x / y for y below 2**126, for FAST to two units in the last place."""
    return libdevice.fast_dividef(x, y) if FAST else x / y


@triton.jit
def _finite(maximum):
    """What is subtracted from logits: while all are -inf, their maximum would give NaN."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def _moved(old_max, new_max):
    """By how much logits less their maximum become more when it becomes ``new_max``; 0 before the first."""
    return tl.where(old_max == -float("inf"), 0.0, old_max - new_max)


@triton.jit
def _absorb(
    z_s,  # [num_groups, GROUP]
    z_t,
    student_max,  # [num_groups], as are the rest
    student_sum,
    teacher_max,
    teacher_sum,
    first,
    second,
    HALF: tl.constexpr,
    KIND: tl.constexpr,
):
    """Adds one block of a row to the running sums of each group of columns; see ``rows.RowSums``."""
    if KIND == MSE:
        difference = tl.where(z_s == z_t, 0.0, z_s - z_t)
        first += tl.sum(difference * difference, axis=1)
    elif KIND == COSINE:
        student_sum += tl.sum(z_s * z_s, axis=1)
        teacher_sum += tl.sum(z_t * z_t, axis=1)
        first += tl.sum(z_s * z_t, axis=1)
    else:
        new_student_max = tl.maximum(student_max, tl.max(z_s, axis=1))
        new_teacher_max = tl.maximum(teacher_max, tl.max(z_t, axis=1))
        student_exponent = to_exponent(_finite(new_student_max), HALF)
        teacher_exponent = to_exponent(_finite(new_teacher_max), HALF)
        student_decay = decay_of(student_max, student_exponent, HALF)
        teacher_decay = decay_of(teacher_max, teacher_exponent, HALF)
        e_s = shifted_exp(z_s, student_exponent[:, None], HALF)
        e_t = shifted_exp(z_t, teacher_exponent[:, None], HALF)
        student_sum *= student_decay
        teacher_sum *= teacher_decay
        if KIND <= MIXED:
            moved = _moved(teacher_max, new_teacher_max) - _moved(student_max, new_student_max)
            excess = (z_t - _finite(new_teacher_max)[:, None]) - (z_s - _finite(new_student_max)[:, None])
            if KIND != REVERSE_KL:
                terms = tl.where(e_t != 0.0, e_t * excess, 0.0)
                first = first * tl.maximum(teacher_decay, _SMALLEST_DECAY) + moved * teacher_sum + tl.sum(terms, axis=1)
            if KIND != FORWARD_KL:
                terms = tl.where(e_s != 0.0, e_s * -excess, 0.0)
                second = (
                    second * tl.maximum(student_decay, _SMALLEST_DECAY) - moved * student_sum + tl.sum(terms, axis=1)
                )
        student_sum += tl.sum(e_s, axis=1)
        teacher_sum += tl.sum(e_t, axis=1)
        student_max, teacher_max = new_student_max, new_teacher_max
    return student_max, student_sum, teacher_max, teacher_sum, first, second


@triton.jit
def sum_logits(
    student_row_ptr,
    teacher_row_ptr,
    places,  # [num_groups, GROUP], of the first block
    size,  # columns of the row, 0 to skip it
    student_scale,
    student_softcap,
    teacher_scale,
    teacher_softcap,
    HALF: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The first step, forwards: sums over the row that need no others. Sums of exponentials are by ``shifted_exp``."""
    num_groups: tl.constexpr = BLOCK_SIZE // GROUP
    student_max = tl.full([num_groups], -float("inf"), dtype=tl.float32)
    teacher_max = tl.full([num_groups], -float("inf"), dtype=tl.float32)
    student_sum = tl.zeros([num_groups], dtype=tl.float32)
    teacher_sum = tl.zeros([num_groups], dtype=tl.float32)
    first = tl.zeros([num_groups], dtype=tl.float32)
    second = tl.zeros([num_groups], dtype=tl.float32)
    full_size = size // BLOCK_SIZE * BLOCK_SIZE
    for start in tl.range(0, full_size, BLOCK_SIZE, num_stages=NUM_STAGES):
        z_s, z_t = _load_pair(
            student_row_ptr, teacher_row_ptr, start + places, None, student_scale, student_softcap, teacher_scale,
            teacher_softcap, KIND,
        )  # fmt: skip
        student_max, student_sum, teacher_max, teacher_sum, first, second = _absorb(
            z_s, z_t, student_max, student_sum, teacher_max, teacher_sum, first, second, HALF, KIND
        )
    if full_size < size:
        z_s, z_t = _load_pair(
            student_row_ptr, teacher_row_ptr, full_size + places, full_size + places < size, student_scale,
            student_softcap, teacher_scale, teacher_softcap, KIND,
        )  # fmt: skip
        student_max, student_sum, teacher_max, teacher_sum, first, second = _absorb(
            z_s, z_t, student_max, student_sum, teacher_max, teacher_sum, first, second, HALF, KIND
        )
    student_shift = _finite(tl.max(student_max, axis=0))
    teacher_shift = _finite(tl.max(teacher_max, axis=0))
    if KIND < MSE:
        student_decay = decay_of(student_max, to_exponent(student_shift, HALF), HALF)
        teacher_decay = decay_of(teacher_max, to_exponent(teacher_shift, HALF), HALF)
        student_sum *= student_decay
        teacher_sum *= teacher_decay
        moved = _moved(teacher_max, teacher_shift) - _moved(student_max, student_shift)
        first = first * tl.maximum(teacher_decay, _SMALLEST_DECAY) + moved * teacher_sum
        second = second * tl.maximum(student_decay, _SMALLEST_DECAY) - moved * student_sum
    return (
        student_shift, tl.sum(student_sum, axis=0), teacher_shift, tl.sum(teacher_sum, axis=0),
        tl.sum(first, axis=0), tl.sum(second, axis=0),
    )  # fmt: skip


@triton.jit
def lse_difference(student_shift, student_sum, teacher_shift, teacher_sum, HALF: tl.constexpr):
    """lse_t - lse_s of logits less their maxima, 0 for equal models."""
    of_student = rounding_of(student_shift, to_exponent(student_shift, HALF), HALF)
    of_teacher = rounding_of(teacher_shift, to_exponent(teacher_shift, HALF), HALF)
    return tl.log(teacher_sum / student_sum) - (of_teacher - of_student)


@triton.jit
def _mix(z_s, z_t, student_shift, teacher_shift, delta, beta, rest, KIND: tl.constexpr):
    """d = log(p / q), clamped, also where both are impossible; and m / q (or 1 where it is not used)."""
    d = (z_t - teacher_shift) - (z_s - student_shift) - delta
    d = tl.maximum(tl.where(d < _CLAMP, d, _CLAMP), -_CLAMP)
    ratio = d
    if KIND != TOTAL_VARIATION:
        ratio = rest + beta * tl.exp2(d * _LOG2_E)  # d is so clamped that this is no denormal number
    return d, ratio


@triton.jit
def _mixture_terms(
    z_s,
    z_t,
    student_shift,
    teacher_shift,
    student_share,  # 1 / student_sum, as the next of the teacher's
    teacher_share,
    delta,
    beta,
    rest,  # 1 - beta
    HALF: tl.constexpr,
    FAST: tl.constexpr,
    KIND: tl.constexpr,
):
    """What a block adds to both sums of the second step; see ``rows.sum_mixtures``."""
    d, ratio = _mix(z_s, z_t, student_shift, teacher_shift, delta, beta, rest, KIND)
    e_s = shifted_exp(z_s, to_exponent(student_shift, HALF), HALF)
    e_t = shifted_exp(z_t, to_exponent(teacher_shift, HALF), HALF)
    if KIND == JSD:
        r = -_log(ratio, FAST)
        first, second = e_t * (d + r), e_s * r
    elif KIND == SKEW_KL:
        first, second = e_t * (d - _log(ratio, FAST)), _divide(e_t, ratio, FAST)
    elif KIND == SKEW_REVERSE_KL:
        first, second = e_s * -_log(ratio, FAST), _divide(e_s, ratio, FAST)
    else:
        first = tl.abs(e_s * student_share - e_t * teacher_share)
        second = tl.where(d < 0.0, e_s, tl.where(d > 0.0, -e_s, 0.0))
    return tl.sum(first, axis=1), tl.sum(second, axis=1)


@triton.jit
def sum_mixtures(
    student_row_ptr,
    teacher_row_ptr,
    places,
    size,
    student_shift,  # see sum_logits, as the next three
    student_sum,
    teacher_shift,
    teacher_sum,
    delta,
    beta,
    rest,
    student_scale,
    student_softcap,
    teacher_scale,
    teacher_softcap,
    HALF: tl.constexpr,
    FAST: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The second step, backwards."""
    first = tl.zeros([BLOCK_SIZE // GROUP], dtype=tl.float32)
    second = tl.zeros([BLOCK_SIZE // GROUP], dtype=tl.float32)
    student_share, teacher_share = 1.0 / student_sum, 1.0 / teacher_sum
    full_size = size // BLOCK_SIZE * BLOCK_SIZE
    if full_size < size:
        z_s, z_t = _load_pair(
            student_row_ptr, teacher_row_ptr, full_size + places, full_size + places < size, student_scale,
            student_softcap, teacher_scale, teacher_softcap, KIND,
        )  # fmt: skip
        more_first, more_second = _mixture_terms(
            z_s,
            z_t,
            student_shift,
            teacher_shift,
            student_share,
            teacher_share,
            delta,
            beta,
            rest,
            HALF,
            FAST,
            KIND,
        )
        first += more_first
        second += more_second
    for done in tl.range(0, full_size, BLOCK_SIZE, num_stages=NUM_STAGES):
        z_s, z_t = _load_pair(
            student_row_ptr, teacher_row_ptr, full_size - BLOCK_SIZE - done + places, None, student_scale,
            student_softcap, teacher_scale, teacher_softcap, KIND,
        )  # fmt: skip
        more_first, more_second = _mixture_terms(
            z_s,
            z_t,
            student_shift,
            teacher_shift,
            student_share,
            teacher_share,
            delta,
            beta,
            rest,
            HALF,
            FAST,
            KIND,
        )
        first += more_first
        second += more_second
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def divergence_of(student_sum, teacher_sum, first, second, delta, beta, rest, vocab_size, KIND: tl.constexpr):
    """A row's divergence, given all its sums; see ``rows.divergence_of``."""
    if KIND == FORWARD_KL:
        value = first / teacher_sum - delta
    elif KIND == REVERSE_KL:
        value = second / student_sum + delta
    elif KIND == MIXED:
        value = beta * (first / teacher_sum - delta) + rest * (second / student_sum + delta)
    elif KIND == JSD:
        value = beta * (first / teacher_sum) + rest * (second / student_sum)
    elif KIND == SKEW_KL:
        value = first / teacher_sum
    elif KIND == SKEW_REVERSE_KL:
        value = first / student_sum
    elif KIND == TOTAL_VARIATION:
        value = 0.5 * first
    elif KIND == MSE:
        value = first / vocab_size
    else:
        value = 1.0 - first * _cosine_norm(student_sum, teacher_sum)
    return value


@triton.jit
def _cosine_norm(student_sum, teacher_sum):
    product = tl.sqrt(student_sum) * tl.sqrt(teacher_sum)
    return tl.where(product == 0.0, 0.0, 1.0 / product)


@triton.jit
def gradient_factors(student_sum, teacher_sum, first, second, factor, beta, rest, vocab_size, KIND: tl.constexpr):
    """Four numbers of a row that :func:`_gradient` takes: factors of the student's and the teacher's columns, and what
    is subtracted."""
    of_student, of_teacher = factor / student_sum, factor / teacher_sum
    subtracted = second / student_sum
    other = 0.0
    if KIND == MIXED:
        of_teacher *= beta
    elif KIND == JSD:
        of_student *= rest
    elif KIND == SKEW_KL:
        of_student *= rest * second / teacher_sum
        of_teacher *= rest
    elif KIND == SKEW_REVERSE_KL:
        other = first / student_sum - rest * subtracted
    elif KIND == TOTAL_VARIATION:
        of_student *= 0.5
    elif KIND == MSE:
        of_student = 2.0 * factor / vocab_size
    elif KIND == COSINE:
        norm = _cosine_norm(student_sum, teacher_sum)
        of_student = tl.where(norm == 0.0, 0.0, factor * first * norm / student_sum)
        of_teacher = factor * norm
    return of_student, of_teacher, subtracted, other


@triton.jit
def _gradient(
    z_s,
    z_t,
    student_shift,
    teacher_shift,
    delta,
    of_student,  # see gradient_factors, as the next three
    of_teacher,
    subtracted,
    other,
    beta,
    rest,
    student_softcap,
    HALF: tl.constexpr,
    FAST: tl.constexpr,
    KIND: tl.constexpr,
):
    """The gradient of the student's raw logits; see ``rows.gradient_of``."""
    if KIND == MSE:
        grad = of_student * tl.where(z_s == z_t, 0.0, z_s - z_t)
    elif KIND == COSINE:
        grad = of_student * z_s - of_teacher * z_t
    else:
        teacher_exponent = to_exponent(teacher_shift, HALF)
        e_s = shifted_exp(z_s, to_exponent(student_shift, HALF), HALF)
        excess = (z_s - student_shift) - (z_t - teacher_shift) - subtracted
        if KIND == FORWARD_KL:
            grad = of_student * e_s - of_teacher * shifted_exp(z_t, teacher_exponent, HALF)
        elif KIND == REVERSE_KL:
            grad = tl.where(e_s != 0.0, of_student * e_s * excess, 0.0)
        elif KIND == MIXED:
            inner = beta + rest * tl.where(e_s != 0.0, excess, 0.0)
            grad = of_student * e_s * inner - of_teacher * shifted_exp(z_t, teacher_exponent, HALF)
        else:
            d, ratio = _mix(z_s, z_t, student_shift, teacher_shift, delta, beta, rest, KIND)
            if KIND == JSD:
                grad = of_student * e_s * (-_log(ratio, FAST) - subtracted)
            elif KIND == SKEW_KL:
                e_t = shifted_exp(z_t, teacher_exponent, HALF)
                grad = of_student * e_s - of_teacher * _divide(e_t, ratio, FAST)
            elif KIND == SKEW_REVERSE_KL:
                grad = of_student * e_s * (-_log(ratio, FAST) - _divide(rest, ratio, FAST) - other)
            else:
                sign = tl.where(d < 0.0, 1.0, tl.where(d > 0.0, -1.0, 0.0))
                grad = of_student * e_s * (sign - subtracted)
    if student_softcap is not None:
        capped = z_s / student_softcap
        grad *= 1.0 - capped * capped
    return grad


@triton.jit
def store_gradient(
    student_row_ptr,
    teacher_row_ptr,
    grad_row_ptr,  # may be student_row_ptr
    places,
    size,  # columns of the row, 0 if its token is ignored
    vocab_size,
    student_shift,
    teacher_shift,
    delta,
    of_student,
    of_teacher,
    subtracted,
    other,
    beta,
    rest,
    student_scale,
    student_softcap,
    teacher_scale,
    teacher_softcap,
    HALF: tl.constexpr,
    FAST: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The third step: backwards after one step, forwards after two. Zeros if the token is ignored."""
    BACKWARDS: tl.constexpr = (KIND <= MIXED) or (KIND >= MSE)
    dtype: tl.constexpr = grad_row_ptr.dtype.element_ty
    full_size = size // BLOCK_SIZE * BLOCK_SIZE
    # Asked for first, before a warp overwrites what others read.
    rest_columns = full_size + places
    rest_mask = rest_columns < size
    z_s, z_t = _load_pair(
        student_row_ptr, teacher_row_ptr, rest_columns, rest_mask, student_scale, student_softcap, teacher_scale,
        teacher_softcap, KIND,
    )  # fmt: skip
    grad = _gradient(
        z_s, z_t, student_shift, teacher_shift, delta, of_student, of_teacher, subtracted, other, beta, rest,
        student_softcap, HALF, FAST, KIND,
    )  # fmt: skip
    tl.store(grad_row_ptr + rest_columns, grad.to(dtype), mask=rest_mask)
    for done in tl.range(0, full_size, BLOCK_SIZE, num_stages=NUM_STAGES):
        start = done
        if BACKWARDS:
            start = full_size - BLOCK_SIZE - done
        z_s, z_t = _load_pair(
            student_row_ptr, teacher_row_ptr, start + places, None, student_scale, student_softcap, teacher_scale,
            teacher_softcap, KIND,
        )  # fmt: skip
        grad = _gradient(
            z_s, z_t, student_shift, teacher_shift, delta, of_student, of_teacher, subtracted, other, beta, rest,
            student_softcap, HALF, FAST, KIND,
        )  # fmt: skip
        tl.store(grad_row_ptr + start + places, grad.to(dtype))
    for start in range(size, vocab_size, BLOCK_SIZE):
        tl.store(grad_row_ptr + start + places, tl.full(places.shape, 0.0, dtype), mask=start + places < vocab_size)
