"""Triton kernel from rows of two models' logits to each token's divergence and gradient; formulas are in ``rows``.

A program owns whole rows. It walks over a row two or three times, each time in the direction opposite to the last, so
that what it read last, and is still in the L2 cache, is read first. Within a block every thread keeps the running sums
of the columns that it loads (Milakov and Gimelshein, arXiv:1805.02867), merged only at the end of the row. The KLs'
sums move with the maxima, so that they take one step less; so do mse and cosine, which have no maxima.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from liger_ops import backend
from liger_ops.backend import Hardware, RowLaunch
from liger_ops.divergence.options import KINDS, DivergenceOptions
from liger_ops.loss.row_math import decay_of, rounding_of, shifted_exp, to_exponent, transform

_FORWARD_KL, _REVERSE_KL, _MIXED, _JSD, _SKEW_KL, _SKEW_REVERSE_KL, _TOTAL_VARIATION, _MSE, _COSINE = map(
    tl.constexpr, range(len(KINDS))
)
_CLAMP = tl.constexpr(80.0)
_LOG2_E = tl.constexpr(1.4426950408889634)
_SMALLEST_DECAY = tl.constexpr(1e-37)  # an infinite sum stays infinite, though its summands have underflown
_GROUP = 8  # neighboring columns of one thread: 16 bytes in bfloat16
_MIN_BLOCK_SIZE, _MAX_BLOCK_SIZE = 128, 4096


@triton.jit
def _load_pair(row_ptrs, columns, mask, transforms, KIND: tl.constexpr):
    """Tempered logits of both models; outside of the row -inf, or 0 for mse and cosine. ``mask`` may be None."""
    student_row_ptr, teacher_row_ptr = row_ptrs
    student_scales, teacher_scales = transforms
    if mask is None:
        z_s = transform(tl.load(student_row_ptr + columns), student_scales)
        z_t = transform(tl.load(teacher_row_ptr + columns), teacher_scales)
    else:
        z_s = transform(tl.load(student_row_ptr + columns, mask=mask, other=0.0), student_scales)
        z_t = transform(tl.load(teacher_row_ptr + columns, mask=mask, other=0.0), teacher_scales)
        outside = -float("inf") if KIND < _MSE else 0.0
        z_s, z_t = tl.where(mask, z_s, outside), tl.where(mask, z_t, outside)
    return z_s, z_t


@triton.jit
def _finite(maximum):
    """The value that is subtracted from logits: while all are -inf, their maximum would give NaN."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def _moved(old_max, new_max):
    """By how much logits less their maximum become more when it becomes ``new_max``; 0 before the first."""
    return tl.where(old_max == -float("inf"), 0.0, old_max - new_max)


@triton.jit
def _absorb_logits(z_s, z_t, sums, KIND: tl.constexpr):
    """The sums of mse (squares of differences) and cosine (all three products), which have no maxima, added to."""
    if KIND == _MSE:
        difference = tl.where(z_s == z_t, 0.0, z_s - z_t)  # also of equal infinities
        student_sum, teacher_sum, product = sums[1] + tl.sum(difference * difference, axis=1), sums[3], sums[4]
    else:
        student_sum, teacher_sum = sums[1] + tl.sum(z_s * z_s, axis=1), sums[3] + tl.sum(z_t * z_t, axis=1)
        product = sums[4] + tl.sum(z_s * z_t, axis=1)
    return sums[0], student_sum, sums[2], teacher_sum, product, sums[5]


@triton.jit
def _absorb_distributions(z_s, z_t, sums, HALF: tl.constexpr, KIND: tl.constexpr):
    """The first step's sums of each group of columns, with one block of a row, ``[num_groups, GROUP]``, added."""
    student_max = tl.maximum(sums[0], tl.max(z_s, axis=1))
    teacher_max = tl.maximum(sums[2], tl.max(z_t, axis=1))
    student_shift, teacher_shift = _finite(student_max), _finite(teacher_max)
    student_decay = decay_of(sums[0], to_exponent(student_shift, HALF), HALF)
    teacher_decay = decay_of(sums[2], to_exponent(teacher_shift, HALF), HALF)
    e_s = shifted_exp(z_s, to_exponent(student_shift, HALF)[:, None], HALF)
    e_t = shifted_exp(z_t, to_exponent(teacher_shift, HALF)[:, None], HALF)
    student_sum, teacher_sum, first, second = sums[1] * student_decay, sums[3] * teacher_decay, sums[4], sums[5]
    if KIND <= _MIXED:
        moved = _moved(sums[2], teacher_max) - _moved(sums[0], student_max)
        excess = (z_t - teacher_shift[:, None]) - (z_s - student_shift[:, None])
        if KIND != _REVERSE_KL:
            terms = tl.where(e_t != 0.0, e_t * excess, 0.0)
            first = first * tl.maximum(teacher_decay, _SMALLEST_DECAY) + moved * teacher_sum + tl.sum(terms, axis=1)
        if KIND != _FORWARD_KL:
            terms = tl.where(e_s != 0.0, e_s * -excess, 0.0)
            second = second * tl.maximum(student_decay, _SMALLEST_DECAY) - moved * student_sum + tl.sum(terms, axis=1)
    return student_max, student_sum + tl.sum(e_s, axis=1), teacher_max, teacher_sum + tl.sum(e_t, axis=1), first, second


@triton.jit
def _absorb(z_s, z_t, sums, HALF: tl.constexpr, KIND: tl.constexpr):
    return _absorb_logits(z_s, z_t, sums, KIND) if KIND >= _MSE else _absorb_distributions(z_s, z_t, sums, HALF, KIND)


@triton.jit
def _merge(sums, HALF: tl.constexpr, KIND: tl.constexpr):
    """The sums of a row from those of its groups."""
    student_shift, teacher_shift = _finite(tl.max(sums[0], axis=0)), _finite(tl.max(sums[2], axis=0))
    student_decay = decay_of(sums[0], to_exponent(student_shift, HALF), HALF)
    teacher_decay = decay_of(sums[2], to_exponent(teacher_shift, HALF), HALF)
    student_sum, teacher_sum = sums[1] * student_decay, sums[3] * teacher_decay
    moved = _moved(sums[2], teacher_shift) - _moved(sums[0], student_shift)
    first = sums[4] * tl.maximum(teacher_decay, _SMALLEST_DECAY) + moved * teacher_sum
    second = sums[5] * tl.maximum(student_decay, _SMALLEST_DECAY) - moved * student_sum
    return (
        student_shift, tl.sum(student_sum, axis=0), teacher_shift, tl.sum(teacher_sum, axis=0),
        tl.sum(first, axis=0), tl.sum(second, axis=0),
    )  # fmt: skip


@triton.jit
def _terms(z_s, z_t, row, factor, HALF: tl.constexpr, FAST: tl.constexpr, KIND: tl.constexpr):
    """A divergence's two functions of each column, its value and its slope w, times ``factor``; and q * factor."""
    student_shift, student_sum, teacher_shift, teacher_sum, delta, beta, rest = row
    q = (factor / student_sum) * shifted_exp(z_s, to_exponent(student_shift, HALF), HALF)
    p = (factor / teacher_sum) * shifted_exp(z_t, to_exponent(teacher_shift, HALF), HALF)
    d = (z_t - teacher_shift) - (z_s - student_shift)
    value = d
    if KIND == _FORWARD_KL:
        slope = -p
    elif KIND == _REVERSE_KL:
        slope = tl.where(q != 0.0, q * -d, 0.0)
    elif KIND == _MIXED:
        slope = rest * tl.where(q != 0.0, q * -d, 0.0) - beta * p
    else:
        d -= delta
        d = tl.maximum(tl.where(d < _CLAMP, d, _CLAMP), -_CLAMP)  # also where both are impossible
        if KIND == _TOTAL_VARIATION:
            sign = tl.where(d < 0.0, 0.5, tl.where(d > 0.0, -0.5, 0.0))
            value, slope = (q - p) * sign, q * sign
        else:
            ratio = rest + beta * tl.exp2(d * _LOG2_E)  # m / q; d is so clamped that it is no denormal number
            r = -(libdevice.fast_logf(ratio) if FAST else tl.log(ratio))
            if KIND == _JSD:
                value, slope = p * (d + r), q * r
            elif KIND == _SKEW_KL:
                value = p * (d + r)
                slope = -(libdevice.fast_dividef(p, ratio) if FAST else p / ratio)
            else:
                value = q * r
                slope = value - rest * (libdevice.fast_dividef(q, ratio) if FAST else q / ratio)
    return value, slope, q


@triton.jit
def _store_gradient(
    z_s, z_t, row, factor, slope_sum, grad_ptrs, mask, softcap, HALF: tl.constexpr, FAST: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of the student's raw logits, ``factor * (w - q * sum(w))``; ``mask`` may be None."""
    if KIND >= _MSE:
        grad = factor * (row[4] * z_s - z_t)
        if KIND == _MSE:
            grad = tl.where(z_s == z_t, 0.0, grad)
    else:
        _, grad, q = _terms(z_s, z_t, row, factor, HALF, FAST, KIND)
        grad -= q * slope_sum
    if softcap is not None:
        capped = z_s / softcap
        grad *= 1.0 - capped * capped
    tl.store(grad_ptrs, grad.to(grad_ptrs.dtype.element_ty), mask=mask)


@backend.Kernel
def divergence_kernel(
    student_ptr,  # [num_rows, num_columns]
    teacher_ptr,  # [num_rows, num_columns]
    grad_logits_ptr,  # [num_rows, num_columns], may be student_ptr; None for no gradient
    token_index_ptr,  # [num_rows], the token of each row, or None if rows are the tokens in order
    labels_ptr,  # [num_tokens], negative for tokens that are ignored
    token_weight_ptr,  # [num_tokens] or None
    grad_scale_ptr,  # [] or [num_tokens], or None
    losses_ptr,  # [num_tokens], float32
    sums_ptr,  # [6, num_rows], float32: see rows.sum_rows; None but for single steps
    strides,  # of the rows of the first three, and of grad_scale
    num_rows,
    num_columns,
    numbers,  # factor of each divergence, beta, 1 - beta
    student_scale,  # None for 1; see DivergenceOptions.transforms
    student_softcap,  # None for none
    teacher_scale,
    teacher_softcap,
    STEP: tl.constexpr,  # None for all; 1 and 2 write to sums, of which the next reads those of all shards
    HALF: tl.constexpr,  # whether both models' logits are in half precision
    FAST: tl.constexpr,  # whether CUDA's logarithm to 2e-7 and division to two units in the last place may be used
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program computes the divergence of every num_programs-th row and, on request, its gradient."""
    BACKWARDS: tl.constexpr = KIND <= _MIXED or KIND >= _MSE  # the gradient's step
    num_groups: tl.constexpr = BLOCK_SIZE // GROUP
    student_row_stride, teacher_row_stride, grad_row_stride, grad_scale_stride = strides
    factor, beta, rest = numbers
    places = (tl.arange(0, num_groups) * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    transforms = ((student_scale, student_softcap), (teacher_scale, teacher_softcap))
    for tile in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row_number = tl.cast(tile, tl.int64)
        token = row_number
        if token_index_ptr is not None:
            token = tl.load(token_index_ptr + row_number)
        kept = tl.load(labels_ptr + token) >= 0
        size = tl.where(kept, num_columns, 0)
        full_size = size // BLOCK_SIZE * BLOCK_SIZE
        row_ptrs = (student_ptr + row_number * student_row_stride, teacher_ptr + row_number * teacher_row_stride)

        # The first step, forwards: maxima, sums of ``shifted_exp``, and those of the KLs.
        if STEP is None or STEP == 1:
            nothing = tl.zeros([num_groups], dtype=tl.float32)
            no_max = nothing - (float("inf") if KIND < _MSE else 0.0)
            sums = (no_max, nothing, no_max, nothing, nothing, nothing)
            for start in range(0, full_size, BLOCK_SIZE):
                z_s, z_t = _load_pair(row_ptrs, start + places, None, transforms, KIND)
                sums = _absorb(z_s, z_t, sums, HALF, KIND)
            if full_size < size:
                z_s, z_t = _load_pair(row_ptrs, full_size + places, full_size + places < size, transforms, KIND)
                sums = _absorb(z_s, z_t, sums, HALF, KIND)
            sums = _merge(sums, HALF, KIND)
            student_shift, student_sum, teacher_shift, teacher_sum, first, second = sums
            if STEP == 1:
                for place in tl.static_range(4):
                    tl.store(sums_ptr + place * num_rows + row_number, sums[place])
        else:
            student_shift = tl.load(sums_ptr + row_number)
            student_sum = tl.load(sums_ptr + num_rows + row_number)
            teacher_shift = tl.load(sums_ptr + 2 * num_rows + row_number)
            teacher_sum = tl.load(sums_ptr + 3 * num_rows + row_number)
            first = tl.load(sums_ptr + 4 * num_rows + row_number)
            second = tl.load(sums_ptr + 5 * num_rows + row_number)
        if KIND == _MSE:  # of these two kinds, delta is the share of the student's logits in the gradient
            delta = tl.full([], 1.0, tl.float32)
        elif KIND == _COSINE:
            norm = tl.sqrt(student_sum) * tl.sqrt(teacher_sum)
            delta = tl.where(norm == 0.0, 0.0, first / student_sum)
        else:  # lse_t - lse_s of logits less their maxima, 0 for equal models
            delta = tl.log(teacher_sum / student_sum)
            delta -= rounding_of(teacher_shift, to_exponent(teacher_shift, HALF), HALF)
            delta += rounding_of(student_shift, to_exponent(student_shift, HALF), HALF)
        row = (student_shift, student_sum, teacher_shift, teacher_sum, delta, beta, rest)

        # The second step, backwards: the divergence and the sum of slopes.
        if not BACKWARDS and (STEP is None or STEP == 2):
            values = tl.zeros([num_groups], dtype=tl.float32)
            slopes = tl.zeros([num_groups], dtype=tl.float32)
            if full_size < size:
                z_s, z_t = _load_pair(row_ptrs, full_size + places, full_size + places < size, transforms, KIND)
                terms = _terms(z_s, z_t, row, 1.0, HALF, FAST, KIND)
                values, slopes = values + tl.sum(terms[0], axis=1), slopes + tl.sum(terms[1], axis=1)
            for done in range(0, full_size, BLOCK_SIZE):
                z_s, z_t = _load_pair(row_ptrs, full_size - BLOCK_SIZE - done + places, None, transforms, KIND)
                terms = _terms(z_s, z_t, row, 1.0, HALF, FAST, KIND)
                values, slopes = values + tl.sum(terms[0], axis=1), slopes + tl.sum(terms[1], axis=1)
            first, second = tl.sum(values, axis=0), tl.sum(slopes, axis=0)
        if STEP == 1 or STEP == 2:
            tl.store(sums_ptr + 4 * num_rows + row_number, first)
            tl.store(sums_ptr + 5 * num_rows + row_number, second)

        # The third step, in the direction opposite to the last.
        if STEP is None or STEP == 3:
            value, slope_sum = first, second
            if KIND <= _MIXED:
                value, slope_sum = 0.0, 0.0
                if KIND != _REVERSE_KL:
                    share = 1.0 if KIND == _FORWARD_KL else beta
                    value += share * (first / teacher_sum - delta)
                    slope_sum -= share
                if KIND != _FORWARD_KL:
                    share = 1.0 if KIND == _REVERSE_KL else rest
                    value += share * (second / student_sum + delta)
                    slope_sum += share * (second / student_sum)
            if KIND == _JSD:
                value = beta * first + rest * second
            if KIND == _MSE:
                value = student_sum
            if KIND == _COSINE:
                inverse = tl.where(norm == 0.0, 0.0, 1.0 / norm)  # the cosine is 0 then, and so is its gradient
                value = 1.0 - first * inverse
            row_factor = tl.where(delta == delta, factor, float("nan"))  # the clamp must not hide logits of NaN
            if token_weight_ptr is not None:
                row_factor *= tl.load(token_weight_ptr + token).to(tl.float32)
            tl.store(losses_ptr + token, tl.where(kept, value * row_factor, 0.0))
            if grad_logits_ptr is not None:
                if grad_scale_ptr is not None:
                    row_factor *= tl.load(grad_scale_ptr + token * grad_scale_stride).to(tl.float32)
                if KIND == _JSD or KIND == _SKEW_KL:  # noqa: SIM109  # Triton has no tuples of constants
                    row_factor *= rest
                if KIND == _MSE:
                    row_factor *= 2.0
                if KIND == _COSINE:
                    row_factor *= inverse
                if student_scale is not None:
                    row_factor *= student_scale
                grad_row_ptr = grad_logits_ptr + row_number * grad_row_stride
                # Asked for first, before a warp overwrites what others read.
                mask = full_size + places < size
                z_s, z_t = _load_pair(row_ptrs, full_size + places, mask, transforms, KIND)
                _store_gradient(
                    z_s, z_t, row, row_factor, slope_sum, grad_row_ptr + full_size + places, mask, student_softcap,
                    HALF, FAST, KIND,
                )  # fmt: skip
                for done in range(0, full_size, BLOCK_SIZE):
                    start = full_size - BLOCK_SIZE - done if BACKWARDS else done
                    z_s, z_t = _load_pair(row_ptrs, start + places, None, transforms, KIND)
                    _store_gradient(
                        z_s, z_t, row, row_factor, slope_sum, grad_row_ptr + start + places, None, student_softcap,
                        HALF, FAST, KIND,
                    )  # fmt: skip
                for start in range(size, num_columns, BLOCK_SIZE):
                    zeros = tl.full(places.shape, 0.0, grad_row_ptr.dtype.element_ty)
                    tl.store(grad_row_ptr + start + places, zeros, mask=start + places < num_columns)


@backend.launch_cache
def choose_divergence_launch(vocab_size: int, hardware: Hardware) -> RowLaunch:
    """Launch parameters: two groups of each model's columns per thread, and as many programs as fill the device.

    On an H200, 2048 rows of 128256 columns in bfloat16: forward KL takes 0.69 ms with 8 warps of a block of 4096, and
    0.73 ms with 32 of 8192; generalized JSD 0.99 and 1.16 ms. At the rate of a copy they would take 0.65 and 0.91 ms.
    """
    block_size = min(triton.next_power_of_2(max(vocab_size, _MIN_BLOCK_SIZE)), _MAX_BLOCK_SIZE)
    num_warps = max(1, block_size // 512)  # two groups per thread, to load both while the other is computed
    return RowLaunch(block_size, num_warps, hardware.warps // num_warps * hardware.multiprocessors)


class Rows(NamedTuple):
    """Rows of both models' logits, and what is computed of them."""

    student: Tensor  # raw logits, [num_rows, num_columns], unit stride in the last dimension; so the next
    teacher: Tensor
    labels: Tensor  # of all tokens, [num_tokens]; see loss.options.flat_tokens
    token_weight: Tensor | None  # [num_tokens]
    grad_scale: Tensor | None  # factor of the gradient, [] or [num_tokens]; None for 1
    options: DivergenceOptions
    token_index: Tensor | None  # the token of each row, [num_rows]; None if rows are all tokens in order
    losses: Tensor  # [num_tokens], at least float32: output buffer, written at these tokens
    grad_logits: Tensor | None  # like student, which it may be: output buffer for the gradient; or None


def launch_divergence(rows: Rows, vocab_size: int, step: int | None = None, sums: Tensor | None = None) -> None:
    """Computes each row's divergence and, if there is a buffer for it, the gradient; or one of the three steps.

    ``vocab_size`` is that of all shards. ``step`` 1 and 2 write this shard's ``sums``, ``[6, num_rows]`` in float32;
    2 and 3 read those of all shards.
    """
    student, teacher, labels, token_weight, grad_scale, options, token_index, losses, grad_logits = rows
    num_rows, num_columns = student.shape
    if num_rows == 0:
        return
    launch = choose_divergence_launch(num_columns, backend.hardware(student.device))
    transforms = {}
    for name, each in zip(("student", "teacher"), options.transforms, strict=True):
        transforms[f"{name}_scale"] = None if each.logit_scale == 1.0 else float(each.logit_scale)
        transforms[f"{name}_softcap"] = None if each.softcap is None else float(each.softcap)
    factor, beta = options.factor / (vocab_size if options.resolved_kind == "mse" else 1), float(options.beta)
    grad_row_stride = 0 if grad_logits is None else grad_logits.stride(0)
    grad_scale_stride = grad_scale.stride(0) if grad_scale is not None and grad_scale.dim() else 0
    divergence_kernel.launch(
        launch.num_programs(num_rows),
        student_ptr=student,
        teacher_ptr=teacher,
        grad_logits_ptr=grad_logits,
        token_index_ptr=token_index,
        labels_ptr=labels,
        token_weight_ptr=token_weight,
        grad_scale_ptr=grad_scale,
        losses_ptr=losses,
        sums_ptr=sums,
        strides=(student.stride(0), teacher.stride(0), grad_row_stride, grad_scale_stride),
        num_rows=num_rows,
        num_columns=num_columns,
        numbers=(float(factor), beta, 1.0 - beta),
        **transforms,
        STEP=step,
        HALF=step is None and torch.float32 not in (student.dtype, teacher.dtype),
        FAST=student.is_cuda,
        KIND=KINDS.index(options.resolved_kind),
        GROUP=_GROUP,
        BLOCK_SIZE=launch.block_size,
        num_warps=launch.num_warps,
    )
