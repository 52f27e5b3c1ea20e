"""Triton kernels that turn logits whose lse is known into their gradient."""

import triton.language as tl

from liger_ops import backend
from liger_ops.loss.row_math import gradient_factors, load_weights, start_of_row, store_row_gradient


@backend.Kernel
def gradient_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    grad_logits_ptr,  # [num_rows, vocab_size], may be logits_ptr
    token_index_ptr,  # [num_rows], the token of each row, or None if rows are the tokens in order
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
    label_smoothing,  # None if it is not used, as are the next two; see TokenLossOptions
    softcap,
    logit_scale,
    z_loss_weight,
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,  # see start_of_row
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program writes the gradient of one token's logits, whose lse is known."""
    row = tl.program_id(0).to(tl.int64)
    token = row
    if token_index_ptr is not None:
        token = tl.load(token_index_ptr + row)
    label = tl.load(labels_ptr + token)
    kept = label != ignore_index
    lse = tl.load(lse_ptr + token)
    label_weight, class_weight_sum, token_weight = load_weights(
        class_weight_ptr, class_weight_sum_ptr, token_weight_ptr, token, label, vocab_size
    )
    probability_factor, label_term, smoothing_term = gradient_factors(
        grad_scale_ptr, grad_scale_stride, token, kept, lse, label_weight, class_weight_sum, token_weight, 1.0,
        vocab_size, label_smoothing, logit_scale, z_loss_weight,
    )  # fmt: skip
    start, head = start_of_row(row, logits_row_stride, GROUP, GROUPED)
    grad_start, _ = start_of_row(row, grad_logits_row_stride, GROUP, GROUPED)
    store_row_gradient(
        logits_ptr + start, grad_logits_ptr + grad_start, head, class_weight_ptr, label, kept, lse,
        tl.load(lse_error_ptr + token), probability_factor, label_term, smoothing_term, None, vocab_size,
        label_smoothing, softcap, logit_scale, GROUP, GROUPED, BLOCK_SIZE, NUM_STAGES,
    )  # fmt: skip


@backend.Kernel
def shard_gradient_kernel(
    logits_ptr,  # [num_rows, num_columns], turned into its gradient
    labels_ptr,  # [num_rows], as are the following; see GradientRows
    kept_ptr,
    lse_ptr,
    lse_error_ptr,
    probability_factor_ptr,
    label_term_ptr,
    smoothing_term_ptr,
    entropy_factor_ptr,  # or None, as the next
    temperature_ptr,
    class_weight_ptr,  # [num_columns] or None
    logits_row_stride,
    num_columns,
    label_smoothing,  # None if it is not used, as are the next two; see TokenLossOptions
    softcap,
    logit_scale,
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,  # see start_of_row
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program writes the gradient of one row, which is a part of a token's logits."""
    row = tl.program_id(0).to(tl.int64)
    start, head = start_of_row(row, logits_row_stride, GROUP, GROUPED)
    row_ptr = logits_ptr + start
    entropy_factor, row_scale, row_softcap = None, logit_scale, softcap
    if entropy_factor_ptr is not None:
        entropy_factor = tl.load(entropy_factor_ptr + row)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        row_scale = (1.0 if logit_scale is None else logit_scale) / temperature
        row_softcap = None if softcap is None else softcap / temperature
    store_row_gradient(
        row_ptr, row_ptr, head, class_weight_ptr, tl.load(labels_ptr + row), tl.load(kept_ptr + row) != 0,
        tl.load(lse_ptr + row), tl.load(lse_error_ptr + row), tl.load(probability_factor_ptr + row),
        tl.load(label_term_ptr + row), tl.load(smoothing_term_ptr + row), entropy_factor, num_columns,
        label_smoothing, row_softcap, row_scale, GROUP, GROUPED, BLOCK_SIZE, NUM_STAGES,
    )  # fmt: skip
