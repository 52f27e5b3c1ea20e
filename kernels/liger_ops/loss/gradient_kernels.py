"""The Triton kernel that turns logits whose lse is known into their gradient."""

import triton.language as tl

from liger_ops import backend
from liger_ops.loss.row_math import (
    factor_of_exp,
    gradient_factors,
    load_edges,
    load_weights,
    size_of_groups,
    start_of_row,
    store_edges,
    store_groups_gradient,
    transform,
)


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
    logits_row_stride,
    grad_logits_row_stride,
    grad_scale_stride,
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
    row = tl.program_id(0).to(tl.int64)
    token = row
    if token_index_ptr is not None:
        token = tl.load(token_index_ptr + row)
    label = tl.load(labels_ptr + token)
    kept = label != ignore_index
    if kept_ptr is not None:
        kept = tl.load(kept_ptr + token) != 0
    lse = tl.load(lse_ptr + token)
    entropy_factor = None
    if probability_factor_ptr is None:
        label_weight, class_weight_sum, token_weight = load_weights(
            class_weight_ptr, class_weight_sum_ptr, token_weight_ptr, token, label, num_columns
        )
        probability_factor, label_term, smoothing_term = gradient_factors(
            grad_scale_ptr, grad_scale_stride, token, kept, lse, label_weight, class_weight_sum, token_weight, 1.0,
            num_columns, label_smoothing, logit_scale, z_loss_weight,
        )  # fmt: skip
    else:
        probability_factor = tl.load(probability_factor_ptr + token)
        label_term = tl.load(label_term_ptr + token)
        smoothing_term = 0.0
        if smoothing_term_ptr is not None:
            smoothing_term = tl.load(smoothing_term_ptr + token)
        if entropy_factor_ptr is not None:
            entropy_factor = tl.load(entropy_factor_ptr + token)
    row_scale = logit_scale
    row_softcap = softcap
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + token)
        row_scale = (1.0 if logit_scale is None else logit_scale) / temperature
        row_softcap = None if softcap is None else softcap / temperature
    HALF: tl.constexpr = logits_ptr.dtype.element_ty != tl.float32
    start, lead = start_of_row(row, logits_row_stride, GROUP, GROUPED)
    grad_start, _ = start_of_row(row, grad_logits_row_stride, GROUP, GROUPED)
    row_ptr, grad_row_ptr = logits_ptr + start, grad_logits_ptr + grad_start
    has_label = kept & (label >= 0) & (label < num_columns)
    label_z = transform(tl.load(row_ptr - lead + label, mask=has_label, other=0.0), row_scale, row_softcap)
    size = size_of_groups(lead, num_columns, GROUP, GROUPED)
    lse_error = tl.load(lse_error_ptr + token)
    exp_factor = factor_of_exp(probability_factor, lse, lse_error, HALF)
    exp_entropy_factor = None
    if entropy_factor is not None:
        exp_entropy_factor = factor_of_exp(entropy_factor, lse, lse_error, HALF)
    if GROUPED == 2:
        columns, in_row, z = load_edges(row_ptr, lead, size, num_columns, row_scale, row_softcap, GROUP)
    tl.debug_barrier()  # before a warp overwrites what others read
    if GROUPED == 2:
        store_edges(
            grad_row_ptr, columns, in_row, z, lead, class_weight_ptr, label, kept, lse, exp_factor, label_term,
            smoothing_term, exp_entropy_factor, label_smoothing, row_softcap, HALF,
        )  # fmt: skip
    store_groups_gradient(
        row_ptr, grad_row_ptr, lead, size, class_weight_ptr, label, label_z, kept, lse, exp_factor, label_term,
        smoothing_term, exp_entropy_factor, label_smoothing, row_softcap, row_scale, GROUP, GROUPED, BLOCK_SIZE,
        NUM_STAGES,
    )  # fmt: skip
