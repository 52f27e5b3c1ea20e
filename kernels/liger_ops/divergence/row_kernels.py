"""Triton kernel from rows of two models' logits to each token's divergence and gradient; formulas are in ``rows``.

A program owns whole rows. It walks over a row two or three times, each time in the direction opposite to the last, so
that what it read last, and is still in the L2 cache, is read first. Within a block every thread keeps the running sums
of the columns that it loads (Milakov and Gimelshein, arXiv:1805.02867), merged only at the end of the row.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from liger_ops import backend
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
_FORWARD_KL = tl.constexpr(0)
_REVERSE_KL = tl.constexpr(1)
_MIXED = tl.constexpr(2)
_JSD = tl.constexpr(3)
_SKEW_KL = tl.constexpr(4)
_SKEW_REVERSE_KL = tl.constexpr(5)
_TOTAL_VARIATION = tl.constexpr(6)
_MSE = tl.constexpr(7)
_COSINE = tl.constexpr(8)
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
        if KIND < _MSE:
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
    if KIND == _MSE:
        difference = tl.where(z_s == z_t, 0.0, z_s - z_t)
        first += tl.sum(difference * difference, axis=1)
    elif KIND == _COSINE:
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
        student_sum = student_sum * student_decay + tl.sum(e_s, axis=1)
        teacher_sum = teacher_sum * teacher_decay + tl.sum(e_t, axis=1)
        if (KIND <= _MIXED) and (KIND != _REVERSE_KL):
            terms = tl.where(e_t != 0.0, e_t * (z_t - z_s), 0.0)
            first = first * tl.maximum(teacher_decay, _SMALLEST_DECAY) + tl.sum(terms, axis=1)
        if (KIND <= _MIXED) and (KIND != _FORWARD_KL):
            terms = tl.where(e_s != 0.0, e_s * (z_s - z_t), 0.0)
            second = second * tl.maximum(student_decay, _SMALLEST_DECAY) + tl.sum(terms, axis=1)
        student_max, teacher_max = new_student_max, new_teacher_max
    return student_max, student_sum, teacher_max, teacher_sum, first, second


@triton.jit
def _sum_logits(
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
    if KIND < _MSE:
        student_decay = decay_of(student_max, to_exponent(student_shift, HALF), HALF)
        teacher_decay = decay_of(teacher_max, to_exponent(teacher_shift, HALF), HALF)
        student_sum *= student_decay
        teacher_sum *= teacher_decay
        first *= tl.maximum(teacher_decay, _SMALLEST_DECAY)
        second *= tl.maximum(student_decay, _SMALLEST_DECAY)
    return (
        student_shift, tl.sum(student_sum, axis=0), teacher_shift, tl.sum(teacher_sum, axis=0),
        tl.sum(first, axis=0), tl.sum(second, axis=0),
    )  # fmt: skip


@triton.jit
def _lse_difference(student_shift, student_sum, teacher_shift, teacher_sum, HALF: tl.constexpr):
    """lse_t - lse_s, 0 for equal models."""
    of_student = rounding_of(student_shift, to_exponent(student_shift, HALF), HALF)
    of_teacher = rounding_of(teacher_shift, to_exponent(teacher_shift, HALF), HALF)
    return (teacher_shift - student_shift) + tl.log(teacher_sum / student_sum) - (of_teacher - of_student)


@triton.jit
def _mix(z_s, z_t, delta, beta, rest, KIND: tl.constexpr):
    """d = log(p / q), clamped, also where both are impossible; and m / q (or 1 where it is not used)."""
    d = z_t - z_s - delta
    d = tl.maximum(tl.where(d < _CLAMP, d, _CLAMP), -_CLAMP)
    ratio = d
    if KIND != _TOTAL_VARIATION:
        ratio = rest + beta * tl.exp2(d * _LOG2_E)  # d is so clamped that this is no denormal number
    return d, ratio


@triton.jit
def _mixture_terms(
    z_s,
    z_t,
    student_exponent,
    teacher_exponent,
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
    d, ratio = _mix(z_s, z_t, delta, beta, rest, KIND)
    e_s = shifted_exp(z_s, student_exponent, HALF)
    e_t = shifted_exp(z_t, teacher_exponent, HALF)
    if KIND == _JSD:
        r = -_log(ratio, FAST)
        first, second = e_t * (d + r), e_s * r
    elif KIND == _SKEW_KL:
        first, second = e_t * (d - _log(ratio, FAST)), _divide(e_t, ratio, FAST)
    elif KIND == _SKEW_REVERSE_KL:
        first, second = e_s * -_log(ratio, FAST), _divide(e_s, ratio, FAST)
    else:
        first = tl.abs(e_s * student_share - e_t * teacher_share)
        second = tl.where(d < 0.0, e_s, tl.where(d > 0.0, -e_s, 0.0))
    return tl.sum(first, axis=1), tl.sum(second, axis=1)


@triton.jit
def _sum_mixtures(
    student_row_ptr,
    teacher_row_ptr,
    places,
    size,
    student_shift,  # see _sum_logits, as the next three
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
    student_exponent, teacher_exponent = to_exponent(student_shift, HALF), to_exponent(teacher_shift, HALF)
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
            student_exponent,
            teacher_exponent,
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
            student_exponent,
            teacher_exponent,
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
def _divergence_of(student_sum, teacher_sum, first, second, delta, beta, rest, vocab_size, KIND: tl.constexpr):
    """A row's divergence, given all its sums; see ``rows.divergence_of``."""
    if KIND == _FORWARD_KL:
        value = first / teacher_sum - delta
    elif KIND == _REVERSE_KL:
        value = second / student_sum + delta
    elif KIND == _MIXED:
        value = beta * (first / teacher_sum - delta) + rest * (second / student_sum + delta)
    elif KIND == _JSD:
        value = beta * (first / teacher_sum) + rest * (second / student_sum)
    elif KIND == _SKEW_KL:
        value = first / teacher_sum
    elif KIND == _SKEW_REVERSE_KL:
        value = first / student_sum
    elif KIND == _TOTAL_VARIATION:
        value = 0.5 * first
    elif KIND == _MSE:
        value = first / vocab_size
    else:
        value = 1.0 - first * _cosine_norm(student_sum, teacher_sum)
    return value


@triton.jit
def _cosine_norm(student_sum, teacher_sum):
    product = tl.sqrt(student_sum) * tl.sqrt(teacher_sum)
    return tl.where(product == 0.0, 0.0, 1.0 / product)


@triton.jit
def _gradient_factors(student_sum, teacher_sum, first, second, factor, beta, rest, vocab_size, KIND: tl.constexpr):
    """Four numbers of a row that :func:`_gradient` takes: factors of the student's and the teacher's columns, and what
    is subtracted."""
    of_student, of_teacher = factor / student_sum, factor / teacher_sum
    subtracted = second / student_sum
    other = 0.0
    if KIND == _MIXED:
        of_teacher *= beta
    elif KIND == _JSD:
        of_student *= rest
    elif KIND == _SKEW_KL:
        of_student *= rest * second / teacher_sum
        of_teacher *= rest
    elif KIND == _SKEW_REVERSE_KL:
        other = first / student_sum - rest * subtracted
    elif KIND == _TOTAL_VARIATION:
        of_student *= 0.5
    elif KIND == _MSE:
        of_student = 2.0 * factor / vocab_size
    elif KIND == _COSINE:
        norm = _cosine_norm(student_sum, teacher_sum)
        of_student = tl.where(norm == 0.0, 0.0, factor * first * norm / student_sum)
        of_teacher = factor * norm
    return of_student, of_teacher, subtracted, other


@triton.jit
def _gradient(
    z_s,
    z_t,
    student_exponent,
    teacher_exponent,
    delta,
    of_student,  # see _gradient_factors, as the next three
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
    if KIND == _MSE:
        grad = of_student * tl.where(z_s == z_t, 0.0, z_s - z_t)
    elif KIND == _COSINE:
        grad = of_student * z_s - of_teacher * z_t
    else:
        e_s = shifted_exp(z_s, student_exponent, HALF)
        if KIND == _FORWARD_KL:
            grad = of_student * e_s - of_teacher * shifted_exp(z_t, teacher_exponent, HALF)
        elif KIND == _REVERSE_KL:
            grad = tl.where(e_s != 0.0, of_student * e_s * (z_s - z_t - subtracted), 0.0)
        elif KIND == _MIXED:
            inner = beta + rest * tl.where(e_s != 0.0, z_s - z_t - subtracted, 0.0)
            grad = of_student * e_s * inner - of_teacher * shifted_exp(z_t, teacher_exponent, HALF)
        else:
            d, ratio = _mix(z_s, z_t, delta, beta, rest, KIND)
            if KIND == _JSD:
                grad = of_student * e_s * (-_log(ratio, FAST) - subtracted)
            elif KIND == _SKEW_KL:
                e_t = shifted_exp(z_t, teacher_exponent, HALF)
                grad = of_student * e_s - of_teacher * _divide(e_t, ratio, FAST)
            elif KIND == _SKEW_REVERSE_KL:
                grad = of_student * e_s * (-_log(ratio, FAST) - _divide(rest, ratio, FAST) - other)
            else:
                sign = tl.where(d < 0.0, 1.0, tl.where(d > 0.0, -1.0, 0.0))
                grad = of_student * e_s * (sign - subtracted)
    if student_softcap is not None:
        capped = z_s / student_softcap
        grad *= 1.0 - capped * capped
    return grad


@triton.jit
def _store_gradient(
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
    BACKWARDS: tl.constexpr = (KIND <= _MIXED) or (KIND >= _MSE)
    dtype: tl.constexpr = grad_row_ptr.dtype.element_ty
    student_exponent, teacher_exponent = to_exponent(student_shift, HALF), to_exponent(teacher_shift, HALF)
    full_size = size // BLOCK_SIZE * BLOCK_SIZE
    # Asked for first, before a warp overwrites what others read.
    rest_columns = full_size + places
    rest_mask = rest_columns < size
    z_s, z_t = _load_pair(
        student_row_ptr, teacher_row_ptr, rest_columns, rest_mask, student_scale, student_softcap, teacher_scale,
        teacher_softcap, KIND,
    )  # fmt: skip
    grad = _gradient(
        z_s, z_t, student_exponent, teacher_exponent, delta, of_student, of_teacher, subtracted, other, beta, rest,
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
            z_s, z_t, student_exponent, teacher_exponent, delta, of_student, of_teacher, subtracted, other, beta, rest,
            student_softcap, HALF, FAST, KIND,
        )  # fmt: skip
        tl.store(grad_row_ptr + start + places, grad.to(dtype))
    for start in range(size, vocab_size, BLOCK_SIZE):
        tl.store(grad_row_ptr + start + places, tl.full(places.shape, 0.0, dtype), mask=start + places < vocab_size)


@backend.Kernel
def divergence_kernel(
    student_ptr,  # [num_rows, vocab_size]
    teacher_ptr,  # [num_rows, vocab_size]
    grad_logits_ptr,  # [num_rows, vocab_size], may be student_ptr; None for no gradient
    token_index_ptr,  # [num_rows], the token of each row, or None if rows are the tokens in order
    labels_ptr,  # [num_tokens], negative for tokens that are ignored
    token_weight_ptr,  # [num_tokens] or None
    grad_scale_ptr,  # [] or [num_tokens], or None
    losses_ptr,  # [num_tokens], float32
    student_row_stride,
    teacher_row_stride,
    grad_row_stride,
    grad_scale_stride,
    num_rows,
    vocab_size,
    factor,  # of each divergence
    beta,
    rest,  # 1 - beta
    student_scale,  # None for 1; see DivergenceOptions.of_student
    student_softcap,  # None for none
    teacher_scale,
    teacher_softcap,
    HALF: tl.constexpr,  # whether both models' logits are in half precision
    FAST: tl.constexpr,  # whether CUDA's fast logarithm and division may be used
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes the divergence of every num_programs-th row and, on request, its gradient."""
    TWO_STEPS: tl.constexpr = (KIND > _MIXED) and (KIND < _MSE)
    places = (tl.arange(0, BLOCK_SIZE // GROUP) * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    for tile in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(tile, tl.int64)
        token = row
        if token_index_ptr is not None:
            token = tl.load(token_index_ptr + row)
        kept = tl.load(labels_ptr + token) >= 0
        size = tl.where(kept, vocab_size, 0)
        student_row_ptr = student_ptr + row * student_row_stride
        teacher_row_ptr = teacher_ptr + row * teacher_row_stride
        student_shift, student_sum, teacher_shift, teacher_sum, first, second = _sum_logits(
            student_row_ptr, teacher_row_ptr, places, size, student_scale, student_softcap, teacher_scale,
            teacher_softcap, HALF, KIND, GROUP, BLOCK_SIZE, NUM_STAGES,
        )  # fmt: skip
        delta = 0.0
        if KIND < _MSE:
            delta = _lse_difference(student_shift, student_sum, teacher_shift, teacher_sum, HALF)
        if TWO_STEPS:
            first, second = _sum_mixtures(
                student_row_ptr, teacher_row_ptr, places, size, student_shift, student_sum, teacher_shift, teacher_sum,
                delta, beta, rest, student_scale, student_softcap, teacher_scale, teacher_softcap, HALF, FAST, KIND,
                GROUP, BLOCK_SIZE, NUM_STAGES,
            )  # fmt: skip
        row_factor = factor
        if token_weight_ptr is not None:
            row_factor *= tl.load(token_weight_ptr + token).to(tl.float32)
        value = _divergence_of(student_sum, teacher_sum, first, second, delta, beta, rest, vocab_size, KIND)
        tl.store(losses_ptr + token, tl.where(kept, value * row_factor, 0.0))
        if grad_logits_ptr is not None:
            if grad_scale_ptr is not None:
                row_factor *= tl.load(grad_scale_ptr + token * grad_scale_stride).to(tl.float32)
            if student_scale is not None:
                row_factor *= student_scale
            of_student, of_teacher, subtracted, other = _gradient_factors(
                student_sum, teacher_sum, first, second, row_factor, beta, rest, vocab_size, KIND
            )
            _store_gradient(
                student_row_ptr, teacher_row_ptr, grad_logits_ptr + row * grad_row_stride, places, size, vocab_size,
                student_shift, teacher_shift, delta, of_student, of_teacher, subtracted, other, beta, rest,
                student_scale, student_softcap, teacher_scale, teacher_softcap, HALF, FAST, KIND, BLOCK_SIZE,
                NUM_STAGES,
            )  # fmt: skip


@backend.Kernel
def shard_kernel(
    student_ptr,  # [num_rows, num_columns]
    teacher_ptr,  # [num_rows, num_columns]
    grad_logits_ptr,  # [num_rows, num_columns], may be student_ptr; None but for the third step
    kept_ptr,  # [num_rows], bool
    sums_ptr,  # [6, num_rows], float32: rows.RowSums, of this shard when written, of all when read
    delta_ptr,  # [num_rows], float32: lse_t - lse_s; None for the first step
    factor_ptr,  # [num_rows], float32, of the gradient; None but for the third step
    student_row_stride,
    teacher_row_stride,
    grad_row_stride,
    num_rows,
    num_columns,
    vocab_size,  # of all shards
    beta,
    rest,  # 1 - beta
    student_scale,  # see divergence_kernel, as the next three
    student_softcap,
    teacher_scale,
    teacher_softcap,
    STEP: tl.constexpr,  # 1, 2 or 3
    FAST: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program takes one step of one row, which is a part of a token's logits."""
    places = (tl.arange(0, BLOCK_SIZE // GROUP) * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    row = tl.program_id(0).to(tl.int64)
    size = tl.where(tl.load(kept_ptr + row) != 0, num_columns, 0)
    student_row_ptr = student_ptr + row * student_row_stride
    teacher_row_ptr = teacher_ptr + row * teacher_row_stride
    if STEP == 1:
        student_max, student_sum, teacher_max, teacher_sum, first, second = _sum_logits(
            student_row_ptr, teacher_row_ptr, places, size, student_scale, student_softcap, teacher_scale,
            teacher_softcap, False, KIND, GROUP, BLOCK_SIZE, NUM_STAGES,
        )  # fmt: skip
        tl.store(sums_ptr + row, student_max)
        tl.store(sums_ptr + num_rows + row, student_sum)
        tl.store(sums_ptr + 2 * num_rows + row, teacher_max)
        tl.store(sums_ptr + 3 * num_rows + row, teacher_sum)
    else:
        student_max = tl.load(sums_ptr + row)
        student_sum = tl.load(sums_ptr + num_rows + row)
        teacher_max = tl.load(sums_ptr + 2 * num_rows + row)
        teacher_sum = tl.load(sums_ptr + 3 * num_rows + row)
        first = tl.load(sums_ptr + 4 * num_rows + row)
        second = tl.load(sums_ptr + 5 * num_rows + row)
        delta = tl.load(delta_ptr + row)
    if STEP == 2:
        first, second = _sum_mixtures(
            student_row_ptr, teacher_row_ptr, places, size, student_max, student_sum, teacher_max, teacher_sum, delta,
            beta, rest, student_scale, student_softcap, teacher_scale, teacher_softcap, False, FAST, KIND, GROUP,
            BLOCK_SIZE, NUM_STAGES,
        )  # fmt: skip
    if STEP == 3:
        of_student, of_teacher, subtracted, other = _gradient_factors(
            student_sum, teacher_sum, first, second, tl.load(factor_ptr + row), beta, rest, vocab_size, KIND
        )
        _store_gradient(
            student_row_ptr, teacher_row_ptr, grad_logits_ptr + row * grad_row_stride, places, size, num_columns,
            student_max, teacher_max, delta, of_student, of_teacher, subtracted, other, beta, rest, student_scale,
            student_softcap, teacher_scale, teacher_softcap, False, FAST, KIND, BLOCK_SIZE, NUM_STAGES,
        )  # fmt: skip
    else:
        tl.store(sums_ptr + 4 * num_rows + row, first)
        tl.store(sums_ptr + 5 * num_rows + row, second)
