"""Triton kernels from rows of two models' logits to each token's divergence and gradient; a program owns whole rows."""

import triton.language as tl

from liger_ops import backend
from liger_ops.divergence.row_steps import (
    MIXED,
    MSE,
    divergence_of,
    gradient_factors,
    lse_difference,
    store_gradient,
    sum_logits,
    sum_mixtures,
)


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
    TWO_STEPS: tl.constexpr = (KIND > MIXED) and (KIND < MSE)
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
        student_shift, student_sum, teacher_shift, teacher_sum, first, second = sum_logits(
            student_row_ptr, teacher_row_ptr, places, size, student_scale, student_softcap, teacher_scale,
            teacher_softcap, HALF, KIND, GROUP, BLOCK_SIZE, NUM_STAGES,
        )  # fmt: skip
        delta = 0.0
        if KIND < MSE:
            delta = lse_difference(student_shift, student_sum, teacher_shift, teacher_sum, HALF)
        if TWO_STEPS:
            first, second = sum_mixtures(
                student_row_ptr, teacher_row_ptr, places, size, student_shift, student_sum, teacher_shift, teacher_sum,
                delta, beta, rest, student_scale, student_softcap, teacher_scale, teacher_softcap, HALF, FAST, KIND,
                GROUP, BLOCK_SIZE, NUM_STAGES,
            )  # fmt: skip
        row_factor = tl.where(delta == delta, factor, float("nan"))  # the clamp must not hide logits of NaN
        if token_weight_ptr is not None:
            row_factor *= tl.load(token_weight_ptr + token).to(tl.float32)
        value = divergence_of(student_sum, teacher_sum, first, second, delta, beta, rest, vocab_size, KIND)
        tl.store(losses_ptr + token, tl.where(kept, value * row_factor, 0.0))
        if grad_logits_ptr is not None:
            if grad_scale_ptr is not None:
                row_factor *= tl.load(grad_scale_ptr + token * grad_scale_stride).to(tl.float32)
            if student_scale is not None:
                row_factor *= student_scale
            of_student, of_teacher, subtracted, other = gradient_factors(
                student_sum, teacher_sum, first, second, row_factor, beta, rest, vocab_size, KIND
            )
            store_gradient(
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
        student_max, student_sum, teacher_max, teacher_sum, first, second = sum_logits(
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
        first, second = sum_mixtures(
            student_row_ptr, teacher_row_ptr, places, size, student_max, student_sum, teacher_max, teacher_sum, delta,
            beta, rest, student_scale, student_softcap, teacher_scale, teacher_softcap, False, FAST, KIND, GROUP,
            BLOCK_SIZE, NUM_STAGES,
        )  # fmt: skip
    if STEP == 3:
        of_student, of_teacher, subtracted, other = gradient_factors(
            student_sum, teacher_sum, first, second, tl.load(factor_ptr + row), beta, rest, vocab_size, KIND
        )
        store_gradient(
            student_row_ptr, teacher_row_ptr, grad_logits_ptr + row * grad_row_stride, places, size, num_columns,
            student_max, teacher_max, delta, of_student, of_teacher, subtracted, other, beta, rest, student_scale,
            student_softcap, teacher_scale, teacher_softcap, False, FAST, KIND, BLOCK_SIZE, NUM_STAGES,
        )  # fmt: skip
    else:
        tl.store(sums_ptr + 4 * num_rows + row, first)
        tl.store(sums_ptr + 5 * num_rows + row, second)
