"""Reductions that all norms share: moments of a row, and sums of the gradients' partial sums."""

import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend


@triton.jit
def moments(x_ptr, length, BLOCK_SIZE: tl.constexpr, NUM_STAGES: tl.constexpr):
    """Mean and sum of squared deviations of ``x_ptr[:length]``.

    Each lane keeps a separate running mean and deviation (Welford, Technometrics 4, 1962), merged at the end (Chan,
    Golub and LeVeque, 1979).
    """
    lanes = tl.arange(0, BLOCK_SIZE)
    mean = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    deviation = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    num_seen = 0.0
    for block in tl.range(0, tl.cdiv(length, BLOCK_SIZE), num_stages=NUM_STAGES):
        offsets = block * BLOCK_SIZE + lanes
        mask = offsets < length
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        num_seen += 1.0
        delta = tl.where(mask, x - mean, 0.0)
        mean += delta * (1.0 / num_seen)
        deviation += delta * (x - mean)
    count = tl.where(lanes < length % BLOCK_SIZE, 1.0, 0.0) + length // BLOCK_SIZE
    total_mean = tl.sum(count * mean, axis=0) / length
    distance = mean - total_mean
    return total_mean, tl.sum(deviation + count * distance * distance, axis=0)


@backend.launch_cache
def _choose_sum_columns(num_columns: int, num_multiprocessors: int) -> int:
    """Columns of a program, two of which share a multiprocessor: at least half a line of memory, at most four."""
    block_columns = triton.next_power_of_2(triton.cdiv(num_columns, 2 * num_multiprocessors))
    return min(128, max(16, block_columns))


@triton.jit
def _sum_part(
    part_ptrs, sum_ptrs, num_parts, num_columns, mask, BLOCK_PARTS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    total = tl.zeros([BLOCK_PARTS, BLOCK_COLUMNS], dtype=tl.float32)
    for start in range(0, num_parts, BLOCK_PARTS):
        parts = start + tl.arange(0, BLOCK_PARTS)[:, None]
        total += tl.load(part_ptrs + parts * num_columns, mask=(parts < num_parts) & mask, other=0.0)
    tl.store(sum_ptrs, tl.sum(total, axis=0)[None, :].to(sum_ptrs.dtype.element_ty), mask=mask)


@backend.Kernel
def _sum_parts_kernel(
    parts_ptr,  # [num_parts, num_columns] of the weight's gradient, then of the bias's; float32
    grad_weight_ptr,  # [num_columns] or None, if there are no such parts
    grad_bias_ptr,  # [num_columns] or None
    num_parts,
    num_columns,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program adds up BLOCK_COLUMNS columns."""
    num_parts = tl.cast(num_parts, tl.int64)  # all parts may have more than 2**31 elements
    columns = (tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS))[None, :]
    mask = columns < num_columns
    part_ptrs = parts_ptr + columns
    if grad_weight_ptr is not None:
        weight_ptrs = grad_weight_ptr + columns
        _sum_part(part_ptrs, weight_ptrs, num_parts, num_columns, mask, BLOCK_PARTS, BLOCK_COLUMNS)
        part_ptrs += num_parts * num_columns
    if grad_bias_ptr is not None:
        bias_ptrs = grad_bias_ptr + columns
        _sum_part(part_ptrs, bias_ptrs, num_parts, num_columns, mask, BLOCK_PARTS, BLOCK_COLUMNS)


def sum_parts(parts: Tensor, grad_weight: Tensor | None, grad_bias: Tensor | None) -> None:
    """Adds up ``parts``, ``[1 or 2, num_parts, num_columns]``, into the gradients that are wanted, in a fixed order."""
    num_parts, num_columns = parts.shape[1:]
    block_columns = _choose_sum_columns(num_columns, backend.hardware(parts.device).multiprocessors)
    _sum_parts_kernel.launch(
        -(-num_columns // block_columns),
        parts_ptr=parts,
        grad_weight_ptr=grad_weight,
        grad_bias_ptr=grad_bias,
        num_parts=num_parts,
        num_columns=num_columns,
        BLOCK_PARTS=4096 // block_columns,
        BLOCK_COLUMNS=block_columns,
        num_warps=4,
    )
