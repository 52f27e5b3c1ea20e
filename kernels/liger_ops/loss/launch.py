"""The host side of the loss kernels: launch choices and launches."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from liger_ops import backend
from liger_ops.backend import Hardware, RowLaunch
from liger_ops.loss.options import Targets, TokenLossOptions
from liger_ops.loss.row_kernels import gradient_kernel, loss_kernel

_GROUP = 8  # neighboring columns of one thread: 16 bytes in bfloat16
_MIN_BLOCK_SIZE = 128
MAX_ROW_IN_REGISTERS = 65536  # bytes

# Most logits of a row, rounded up to a power of two; warps; programs per multiprocessor, as many as fill it; rows
# loaded ahead, as far as shared memory holds them. In brackets, on an H200 in bfloat16, the time over that of reading
# and writing every logit once.
_WHOLE_ROW = (
    (1024, 1, 12, 0),  # 1001 logits (2.7, as every program counts the tokens; with 16 programs 3.5)
    (2048, 4, 16, 0),
    (4096, 4, 8, 0),
    (8192, 4, 4, 0),  # 8192 logits (1.2), 8191 (1.2)
    # 32768 logits (1.10), 32767 (1.35); with one row ahead (1.40, 1.62), with 32 warps (1.13, 1.47).
    (math.inf, 16, 1, 2),
)


def _grouping(logits: Tensor, grad_logits: Tensor | None) -> int:
    """The kernels' ``GROUPED``: rows of both must start at the same place within a group; see ``start_of_row``."""
    others = [] if grad_logits is None or grad_logits is logits else [grad_logits]
    group_bytes = _GROUP * logits.element_size()
    for each in (logits, *others):
        if each.data_ptr() % group_bytes or (each.stride(0) - logits.stride(0)) % _GROUP:
            return 0
    return 2 if logits.stride(0) % _GROUP or logits.shape[1] % _GROUP else 1


def _block_size(vocab_size: int) -> int:
    return triton.next_power_of_2(max(vocab_size, _MIN_BLOCK_SIZE))


@backend.launch_cache
def choose_whole_row_launch(vocab_size: int, hardware: Hardware, row_bytes: int) -> RowLaunch:
    """Launch parameters for rows that a program holds in registers; ``row_bytes`` include class weights."""
    block_size = _block_size(vocab_size)
    _, num_warps, programs, rows_ahead = next(choice for choice in _WHOLE_ROW if block_size <= choice[0])
    num_stages = 1 + min(rows_ahead, hardware.ahead_bytes // row_bytes)
    programs = min(programs, hardware.warps // num_warps)
    return RowLaunch(block_size, num_warps, programs * hardware.multiprocessors, num_stages)


@backend.launch_cache
def choose_block_launch(vocab_size: int, hardware: Hardware, column_bytes: int) -> RowLaunch:
    """Launch parameters for rows that are walked over in blocks.

    Two programs share a multiprocessor, so that one loads while the other reduces, if the L2 cache still holds their
    rows when they are read again. Longer rows are for programs that fill a multiprocessor.

    On an H200 in bfloat16, time over that of reading and writing every logit once: rows of 50257 logits 1.43 in blocks
    of 4096 with 16 warps and five blocks loaded ahead (1.46 with none, 1.75 in blocks of 16384), rows of 128257 1.50
    and of 151936 1.46 in blocks of 16384 with 32 warps (1.63 and 1.55 in blocks of 4096). Larger blocks are no faster,
    and spill registers where stats are wanted or logits are float32. ``column_bytes`` include class weights.
    """
    programs = 2 * hardware.multiprocessors
    cached_bytes = hardware.cache_bytes * 18 // 25  # 36 of 50 MiB, as the gradient passes through the cache too
    if programs * vocab_size * column_bytes <= cached_bytes:
        block_size = min(_block_size(vocab_size), 4096)
        num_stages = 1 + min(5, hardware.ahead_bytes // (2 * block_size * column_bytes))
        return RowLaunch(block_size, max(1, block_size // 256), programs, num_stages)
    block_size = min(_block_size(vocab_size), 16384)
    num_warps = max(1, block_size // 512)
    return RowLaunch(block_size, num_warps, min(2, hardware.warps // num_warps) * hardware.multiprocessors)


@backend.launch_cache
def choose_gradient_launch(vocab_size: int) -> RowLaunch:
    """Launch parameters for a gradient that is not computed with its loss: one row per program."""
    block_size = min(_block_size(vocab_size), 4096)
    return RowLaunch(block_size, max(1, block_size // 1024))


class GradientRows(NamedTuple):
    """What the gradient of tokens' logits is made of: ``A * p + B * p * log(p) - C * [label] - D * class weight``.

    ``[num_tokens]`` each, contiguous, with p the probabilities and factors that include the logits' scale.
    """

    labels: Tensor  # int64, the column of the label, -1 if it is no column of these logits
    lse: Tensor  # at least float32, as are the following
    lse_error: Tensor
    probability_factor: Tensor  # A
    label_term: Tensor  # C
    smoothing_term: Tensor | None = None  # D, None for 0
    entropy_factor: Tensor | None = None  # B, None for 0
    temperature: Tensor | None = None  # divides logit_scale and softcap
    kept: Tensor | None = None  # bool, False where the gradient is zero; None for all tokens


ROW_OUTPUTS = (
    "losses", "lse", "lse_error", "log_probs", "entropy", "predictions", "correct", "mean_logit", "log_sum_sq_probs",
)  # fmt: skip
"""What :func:`launch_loss` computes of each token."""


def _shared_arguments(
    logits: Tensor,
    grad_logits: Tensor | None,
    class_weight: Tensor | None,
    grad_scale: Tensor | None,
    options: TokenLossOptions,
) -> dict[str, Any]:
    """Arguments of both kernels."""
    grad_row_stride = 0 if grad_logits is None else grad_logits.stride(0)
    grad_scale_stride = grad_scale.stride(0) if grad_scale is not None and grad_scale.dim() else 0
    return {
        "logits_ptr": logits,
        "grad_logits_ptr": grad_logits,
        "class_weight_ptr": class_weight,
        "grad_scale_ptr": grad_scale,
        "GROUP": _GROUP,
        "GROUPED": _grouping(logits, grad_logits),
        "strides": (logits.stride(0), grad_row_stride, grad_scale_stride),
        "ignore_index": options.ignore_index,
        "softcap": options.softcap,
        "logit_scale": None if options.logit_scale == 1.0 else options.logit_scale,
        "z_loss_weight": options.z_loss_weight,
    }


def launch_loss(
    logits: Tensor,
    targets: Targets,
    options: TokenLossOptions,
    outputs: Mapping[str, Tensor],
    *,
    grad_scale: Tensor | None = None,
    mean_scale: Tensor | None = None,
    temperature: Tensor | None = None,
    grad_logits: Tensor | None = None,
    token_index: Tensor | None = None,
) -> None:
    """Computes what output buffers are given for.

    Args:
        logits: ``[num_rows, vocab_size]``, unit stride in the last dimension.
        targets: Labels and weights, ``[num_tokens]``, contiguous.
        options: Of the loss.
        outputs: Buffers by names of ``ROW_OUTPUTS``, ``[num_tokens]``; float32, int64 (predictions) or bool (correct).
            ``mean_logit`` is the mean of the scaled and capped logits, times the class weights if there are any.
        grad_scale: Factor of the gradient, ``[]`` or ``[num_tokens]``; None for 1.
        mean_scale: Output buffer for the factor that makes the losses' sum a mean, ``[]``, float32; the gradient then
            has that factor too. Only if rows are all tokens.
        temperature: Divides ``logit_scale`` and ``softcap`` of each token, ``[num_tokens]``, float32.
        grad_logits: Output buffer for the gradient of ``sum(losses * grad_scale)``; may be ``logits`` itself.
        token_index: The token of each row, ``[num_rows]``, int64; None if rows are all tokens in order.
    """
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        if mean_scale is not None:
            mean_scale.zero_()
        return
    labels, class_weight, token_weight = targets
    hardware = backend.hardware(logits.device)
    arguments = _shared_arguments(logits, grad_logits, class_weight, grad_scale, options)
    row_size = max(1, vocab_size - (vocab_size % _GROUP if arguments["GROUPED"] else 0))  # edges are apart
    row_bytes = row_size * logits.element_size()
    whole_row = grad_logits is not None and row_bytes <= MAX_ROW_IN_REGISTERS
    weight_bytes = 0 if class_weight is None else class_weight.element_size()
    if whole_row:
        block_bytes = triton.next_power_of_2(row_bytes) + 2 * triton.next_power_of_2(vocab_size) * weight_bytes
        launch = choose_whole_row_launch(row_size, hardware, block_bytes)
    else:
        column_bytes = logits.element_size() + weight_bytes
        launch = choose_block_launch(vocab_size, hardware, column_bytes)
    loss_kernel.launch(
        launch.num_programs(num_rows),
        **arguments,
        **{f"{name}_ptr": outputs.get(name) for name in ROW_OUTPUTS},
        labels_ptr=labels,
        class_weight_sum_ptr=None if class_weight is None else class_weight.sum(dtype=torch.float32),
        token_weight_ptr=token_weight,
        token_index_ptr=token_index,
        mean_scale_ptr=mean_scale,
        temperature_ptr=temperature,
        num_rows=num_rows,
        vocab_size=vocab_size,
        label_smoothing=options.label_smoothing or None,
        WHOLE_ROW=whole_row,
        EVEN=whole_row and vocab_size == launch.block_size and arguments["GROUPED"] < 2,  # without edges
        BLOCK_SIZE=launch.block_size,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
    )


def launch_gradient(
    logits: Tensor,
    grad_logits: Tensor,
    options: TokenLossOptions,
    *,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    grad_scale: Tensor | None = None,
    token_index: Tensor | None = None,
    **tokens: Tensor | None,
) -> None:
    """Writes the gradient of logits whose lse is known to ``grad_logits``, which may be ``logits`` itself.

    Args:
        class_weight: Of the columns.
        tokens: The fields of :class:`GradientRows`; or labels, lse and its error, of whole rows: the gradient is that
            of ``sum(losses * grad_scale)`` then, with ``token_weight``.
        logits, grad_logits, options, grad_scale, token_index: As for :func:`launch_loss`.
    """
    num_rows, num_columns = logits.shape
    if logits.numel() == 0:
        return
    launch = choose_gradient_launch(num_columns)
    with_factors = tokens.get("probability_factor") is not None
    with_smoothing = tokens.get("smoothing_term") is not None if with_factors else options.label_smoothing > 0
    gradient_kernel.launch(
        launch.num_programs(num_rows),
        **_shared_arguments(logits, grad_logits, class_weight, grad_scale, options),
        **{f"{name}_ptr": tokens.get(name) for name in GradientRows._fields},
        class_weight_sum_ptr=None if with_factors or class_weight is None else class_weight.sum(dtype=torch.float32),
        token_weight_ptr=token_weight,
        token_index_ptr=token_index,
        num_columns=num_columns,
        label_smoothing=float(options.label_smoothing) if with_smoothing else None,
        BLOCK_SIZE=launch.block_size,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
    )
