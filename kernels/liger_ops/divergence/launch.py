"""The host side of the divergence kernels: launch choices and launches."""

from typing import Any

import torch
import triton
from torch import Tensor

from liger_ops import backend
from liger_ops.divergence.options import DivergenceOptions, Transform
from liger_ops.divergence.row_kernels import divergence_kernel, shard_kernel
from liger_ops.divergence.row_steps import KIND_NUMBERS
from liger_ops.loss.launch import CrossEntropyLaunch

_GROUP = 8  # neighbouring columns of one thread: 16 bytes in bfloat16
_MIN_BLOCK_SIZE, _MAX_BLOCK_SIZE = 128, 4096


@backend.launch_cache
def choose_divergence_launch(vocab_size: int, num_multiprocessors: int) -> CrossEntropyLaunch:
    """Launch parameters: two groups of each model's columns a thread, and as many programs as fill the device.

    On an H200, 2048 rows of 128256 columns in bfloat16: forward KL takes 0.69 ms with 8 warps of a block of 4096, and
    0.73 ms with 32 of 8192; generalised JSD 0.99 and 1.16 ms. At the rate of a copy they would take 0.65 and 0.91 ms.

    Args:
        vocab_size: Length of a row.
        num_multiprocessors: Of the GPU.
    """
    block_size = min(triton.next_power_of_2(max(vocab_size, _MIN_BLOCK_SIZE)), _MAX_BLOCK_SIZE)
    num_warps = max(1, block_size // 512)  # two groups a thread, to load both while the other is computed
    return CrossEntropyLaunch(block_size, num_warps, 64 // num_warps * num_multiprocessors)


def launch_divergence(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    grad_scale: Tensor | None,
    options: DivergenceOptions,
    *,
    token_index: Tensor | None,
    losses: Tensor,
    grad_logits: Tensor | None,
) -> None:
    """Computes each row's divergence and, if there is a buffer for it, the gradient.

    Arguments as for :func:`~liger_ops.divergence.divergence.write_rows`; rows of unit stride.
    """
    num_rows, vocab_size = student.shape
    if num_rows == 0:
        return
    launch = choose_divergence_launch(vocab_size, backend.num_multiprocessors(student.device))
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
        grad_scale_stride=grad_scale.stride(0) if grad_scale is not None and grad_scale.dim() else 0,
        vocab_size=vocab_size,
        factor=options.factor,
        HALF=torch.float32 not in (student.dtype, teacher.dtype),
        **_shared_arguments(student, teacher, grad_logits, options, launch),
    )


def launch_shard_step(
    step: int,
    student: Tensor,
    teacher: Tensor,
    kept: Tensor,
    sums: Tensor,
    delta: Tensor | None,
    options: DivergenceOptions,
    vocab_size: int,
    *,
    factor: Tensor | None = None,
    grad_logits: Tensor | None = None,
) -> None:
    """One step of rows of a shard; see :mod:`liger_ops.divergence.vocab_parallel`.

    Args:
        step: 1 and 2 write to ``sums``, 3 to ``grad_logits``.
        student, teacher, grad_logits: ``[num_rows, num_columns]``, unit stride in the last dimension.
        kept: ``[num_rows]``, bool.
        sums: ``[6, num_rows]``, float32, contiguous: the fields of ``RowSums``.
        delta: ``[num_rows]``, float32: ``RowSums.delta``.
        options: Of the divergence.
        vocab_size: Classes of all shards.
        factor: ``[num_rows]``, float32: of the gradient.
    """
    num_rows, num_columns = student.shape
    if student.numel() == 0:
        return
    launch = choose_divergence_launch(num_columns, backend.num_multiprocessors(student.device))
    shard_kernel.launch(
        num_rows,
        student_ptr=student,
        teacher_ptr=teacher,
        grad_logits_ptr=grad_logits,
        kept_ptr=kept,
        sums_ptr=sums,
        delta_ptr=delta,
        factor_ptr=factor,
        num_columns=num_columns,
        vocab_size=vocab_size,
        STEP=step,
        **_shared_arguments(student, teacher, grad_logits, options, launch),
    )


def _shared_arguments(
    student: Tensor,
    teacher: Tensor,
    grad_logits: Tensor | None,
    options: DivergenceOptions,
    launch: CrossEntropyLaunch,
) -> dict[str, Any]:
    """Arguments of both kernels."""
    return {
        "student_row_stride": student.stride(0),
        "teacher_row_stride": teacher.stride(0),
        "grad_row_stride": 0 if grad_logits is None else grad_logits.stride(0),
        "num_rows": student.shape[0],
        "beta": float(options.beta),
        "rest": 1.0 - float(options.beta),
        **_transform_arguments("student", options.of_student),
        **_transform_arguments("teacher", options.of_teacher),
        "FAST": student.is_cuda,
        "KIND": KIND_NUMBERS[options.resolved_kind],
        "GROUP": _GROUP,
        "BLOCK_SIZE": launch.block_size,
        "NUM_STAGES": launch.num_stages,
        "num_warps": launch.num_warps,
    }


def _transform_arguments(name: str, transform: Transform) -> dict[str, float | None]:
    scale = None if transform.scale == 1.0 else float(transform.scale)
    return {f"{name}_scale": scale, f"{name}_softcap": None if transform.softcap is None else float(transform.softcap)}
