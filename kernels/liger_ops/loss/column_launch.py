"""The host side of the loss kernels for logits that are stored by columns: launch choices and launches."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from liger_ops import backend
from liger_ops.loss.column_kernels import column_gradient_kernel, column_sums_kernel, column_tokens_kernel
from liger_ops.loss.launch import transform_arguments
from liger_ops.loss.options import Targets, TokenLossOptions, TokenStats

# Of a tile. On an H200, 4096 tokens and 128256 classes in bfloat16, the time over that of three passes: 1.27; with 64
# tokens and 16 lanes 1.35, with 16 columns 1.41.
_TOKENS, _LANES, _COLUMNS = 128, 8, 8
_NUM_WARPS = 4
_PROGRAMS_PER_MULTIPROCESSOR = 32
_MAX_RANGES = 64
_MERGED_TOKENS = 32


class ColumnLaunch(NamedTuple):
    """How the logits are shared by programs: tiles of tokens, and ranges of so many classes."""

    num_tiles: int
    num_ranges: int
    range_size: int


@backend.launch_cache
def choose_column_launch(num_tiles: int, vocab_size: int, num_multiprocessors: int) -> ColumnLaunch:
    """Launch parameters; ranges of whole blocks, as many as occupy the GPU.

    Args:
        num_tiles: Of ``_TOKENS`` tokens each.
        vocab_size: Classes.
        num_multiprocessors: Of the GPU.
    """
    wanted = triton.cdiv(_PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors, num_tiles)
    block = _LANES * _COLUMNS
    range_size = triton.cdiv(triton.cdiv(vocab_size, min(wanted, _MAX_RANGES)), block) * block
    return ColumnLaunch(num_tiles, triton.cdiv(vocab_size, range_size), range_size)


def launch_column_loss(
    logits: Tensor,
    targets: Targets,
    grad_scale: Tensor | None,
    options: TokenLossOptions,
    *,
    losses: Tensor,
    stats: TokenStats | None = None,
    grad_logits: Tensor | None = None,
    token_index: Tensor | None = None,
) -> None:
    """Computes each token's loss, and everything else that an output buffer is given for.

    Args:
        logits: ``[num_rows, vocab_size]``, unit stride in the first dimension. Rows are read and written whole lines of
            memory at a time if their number is a multiple of 16.
        grad_logits: Output buffer for the gradient of ``sum(losses * grad_scale)``, laid out like ``logits``; may be
            ``logits`` itself.
        targets, grad_scale, options, losses, stats, token_index: As for :func:`~liger_ops.loss.launch.launch_loss`.
    """
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    labels, class_weight, token_weight = targets
    launch = choose_column_launch(
        triton.cdiv(num_rows, _TOKENS), vocab_size, backend.num_multiprocessors(logits.device)
    )
    with_sum = bool(options.label_smoothing)
    partial = losses.new_empty(2 + with_sum + (stats is not None), launch.num_ranges, num_rows, dtype=torch.float32)
    maxima, normalisers, *others = partial.unbind()
    weighted_sums = others[0] if with_sum else None
    expected = None if stats is None else others[-1]
    range_predictions = None if stats is None else labels.new_empty(launch.num_ranges, num_rows, dtype=torch.int32)
    label_z = losses.new_empty(num_rows, dtype=torch.float32)
    factors = None if grad_logits is None else losses.new_empty(4, num_rows, dtype=torch.float32)
    transform = transform_arguments(options)
    tile = {"TOKENS": _TOKENS, "LANES": _LANES, "COLUMNS": _COLUMNS, "num_warps": _NUM_WARPS}
    column_sums_kernel.launch(
        launch.num_tiles * launch.num_ranges,
        logits_ptr=logits,
        token_index_ptr=token_index,
        labels_ptr=labels,
        class_weight_ptr=class_weight if with_sum else None,
        label_z_ptr=label_z,
        maxima_ptr=maxima,
        normalisers_ptr=normalisers,
        weighted_sums_ptr=weighted_sums,
        expected_ptr=expected,
        predictions_ptr=range_predictions,
        column_stride=logits.stride(1),
        num_rows=num_rows,
        vocab_size=vocab_size,
        range_size=launch.range_size,
        num_tiles=launch.num_tiles,
        **transform,
        **tile,
    )
    column_tokens_kernel.launch(
        triton.cdiv(num_rows, _MERGED_TOKENS),
        maxima_ptr=maxima,
        normalisers_ptr=normalisers,
        weighted_sums_ptr=weighted_sums,
        expected_ptr=expected,
        range_predictions_ptr=range_predictions,
        label_z_ptr=label_z,
        token_index_ptr=token_index,
        labels_ptr=labels,
        class_weight_ptr=class_weight,
        class_weight_sum_ptr=None if class_weight is None else class_weight.sum(dtype=torch.float32),
        token_weight_ptr=token_weight,
        grad_scale_ptr=grad_scale,
        losses_ptr=losses,
        lse_ptr=None if stats is None else stats.lse,
        log_probs_ptr=None if stats is None else stats.log_probs,
        entropy_ptr=None if stats is None else stats.entropy,
        predictions_ptr=None if stats is None else stats.predictions,
        correct_ptr=None if stats is None else stats.correct,
        factors_ptr=factors,
        grad_scale_stride=grad_scale.stride(0) if grad_scale is not None and grad_scale.dim() else 0,
        num_rows=num_rows,
        vocab_size=vocab_size,
        num_ranges=launch.num_ranges,
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing or None,
        z_loss_weight=options.z_loss_weight,
        HALF=logits.dtype != torch.float32,
        RANGES=triton.next_power_of_2(launch.num_ranges),
        TOKENS=_MERGED_TOKENS,
        num_warps=_NUM_WARPS,
        **transform,
    )
    if grad_logits is None:
        return
    column_gradient_kernel.launch(
        launch.num_tiles * launch.num_ranges,
        logits_ptr=logits,
        grad_logits_ptr=grad_logits,
        token_index_ptr=token_index,
        labels_ptr=labels,
        class_weight_ptr=class_weight,
        factors_ptr=factors,
        column_stride=logits.stride(1),
        grad_column_stride=grad_logits.stride(1),
        num_rows=num_rows,
        vocab_size=vocab_size,
        range_size=launch.range_size,
        num_tiles=launch.num_tiles,
        num_ranges=launch.num_ranges,
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing or None,
        **transform,
        **tile,
    )
