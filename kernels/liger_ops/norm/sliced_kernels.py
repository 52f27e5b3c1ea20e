"""Kernels of RMSNorm with a gate, in groups of columns, or with a scale and a shift of each sample.

The columns of a group in the rows of a sample are a slice. With z = x, or x * act(gate) if the gate comes first,
n = z * rstd, rstd = 1 / sqrt(mean(z**2) + eps) over the group and s = (offset + weight) * (1 + scale), a slice's row is

    y = n * s + shift        or, if the gate comes last, y = n * s * act(gate)

With g the gradient of n * s, which is dy or dy * act(gate), and S = sum of g * n over the rows of a sample,

    dz = rstd * (g * s - n * mean(g * s * n))        dshift = sum over rows of a sample of g
    dscale = S * (offset + weight)                   dweight = sum over samples of S * (1 + scale)

Arithmetic is float32; the rounding of n ("llama") counts as the identity in backward. A program of backward walks over
rows of one slice and keeps sums of them in registers, which are added in a fixed order, so results repeat.
"""

import triton
import triton.language as tl

from liger_ops import backend
from liger_ops.backend import RowLaunch

MAX_GROUP_SIZE = 16384
"""That registers hold: longer rows run in PyTorch."""


@backend.launch_cache
def choose_launch(group_size: int, input_bytes: int, shared_bytes: int) -> RowLaunch:
    """Tiles of 4096 elements or one longer row; ``input_bytes`` are those of one element of all tensors read."""
    block_size = triton.next_power_of_2(group_size)
    tile_size = max(4096, block_size)
    tiles_ahead = min(2, shared_bytes // (tile_size * input_bytes))
    return RowLaunch(block_size, min(32, tile_size // 512), None, 1 + tiles_ahead, tile_size // block_size)


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    """The activation of a gate, and its derivative."""
    sigmoid = tl.sigmoid(gate)
    if ACTIVATION == "sigmoid":
        return sigmoid, sigmoid * (1.0 - sigmoid)
    else:
        return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid))


@triton.jit
def _find_slice(num_parts, num_groups, group_size, BLOCK_SIZE: tl.constexpr):
    """This program's part of a slice: part, sample, group, columns and whether they exist."""
    group = tl.program_id(0) // num_parts % num_groups
    lanes = tl.arange(0, BLOCK_SIZE)[None, :]
    sample = (tl.program_id(0) // num_parts // num_groups).to(tl.int64)
    return tl.program_id(0) % num_parts, sample, group, group * group_size + lanes, lanes < group_size


@triton.jit
def _load_scale(weight_ptr, scale_ptr, mask, offset):
    """(offset + weight) * (1 + scale) in float32, each factor 1 if its pointers are None."""
    factor = 1.0
    if weight_ptr is not None:
        factor = offset + tl.load(weight_ptr, mask=mask, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        factor *= 1.0 + tl.load(scale_ptr, mask=mask, other=0.0).to(tl.float32)
    return factor


@backend.Kernel
def forward_kernel(
    x_ptr,  # [num_rows, num_groups * group_size]
    gate_ptr,  # as x_ptr, or None
    weight_ptr,  # [num_groups * group_size] or None
    scale_ptr,  # [num_samples, num_groups * group_size], contiguous, or None
    shift_ptr,  # as scale_ptr
    y_ptr,  # as x_ptr, contiguous
    rstd_ptr,  # [num_rows, num_groups]
    x_row_stride,
    gate_row_stride,
    rows_per_sample,
    num_groups,
    group_size,
    num_parts,
    eps,
    offset,
    GATING: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CASTING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program normalizes every num_parts-th tile of BLOCK_ROWS rows of a slice."""
    part, sample, group, columns, column_mask = _find_slice(num_parts, num_groups, group_size, BLOCK_SIZE)
    of_sample = sample * num_groups * group_size + columns
    weight_ptrs = None if weight_ptr is None else weight_ptr + columns
    scale = _load_scale(weight_ptrs, None if scale_ptr is None else scale_ptr + of_sample, column_mask, offset)
    for tile in tl.range(part, (rows_per_sample - 1) // BLOCK_ROWS + 1, num_parts, num_stages=NUM_STAGES):
        rows = (tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
        row_mask = rows < rows_per_sample
        rows += sample * rows_per_sample
        mask = row_mask & column_mask
        x = tl.load(x_ptr + rows * x_row_stride + columns, mask=mask, other=0.0)
        z = x.to(tl.float32)
        if GATING != "none":
            gate = tl.load(gate_ptr + rows * gate_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
            factor, _ = _activate(gate, ACTIVATION)
        if GATING == "first":
            z *= factor
        rstd = tl.rsqrt(tl.sum(z * z, axis=1)[:, None] / group_size + eps)
        tl.store(rstd_ptr + rows * num_groups + group, rstd, mask=row_mask)
        y = z * rstd
        if CASTING == "llama":
            y = y.to(x.dtype).to(tl.float32)
        y *= scale
        if shift_ptr is not None:
            y += tl.load(shift_ptr + of_sample, mask=column_mask, other=0.0).to(tl.float32)
        if GATING == "last":
            y *= factor
        tl.store(y_ptr + rows * num_groups * group_size + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@backend.Kernel
def backward_kernel(
    x_ptr,  # all as in forward_kernel
    grad_y_ptr,  # as x_ptr
    gate_ptr,
    weight_ptr,
    scale_ptr,
    rstd_ptr,
    grad_x_ptr,  # as x_ptr, contiguous, or None
    grad_gate_ptr,  # as grad_x_ptr
    parts_ptr,  # [num_samples, num_parts, num_groups * group_size] of S if GRAD_SCALE, then of dshift if GRAD_SHIFT
    x_row_stride,
    grad_y_row_stride,
    gate_row_stride,
    rows_per_sample,
    num_groups,
    group_size,
    num_parts,
    offset,
    GATING: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GRAD_SCALE: tl.constexpr,
    GRAD_SHIFT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program takes every num_parts-th tile of BLOCK_ROWS rows of a slice: their gradients and sums."""
    part, sample, group, columns, column_mask = _find_slice(num_parts, num_groups, group_size, BLOCK_SIZE)
    hidden_size = num_groups * group_size
    weight_ptrs = None if weight_ptr is None else weight_ptr + columns
    scale_ptrs = None if scale_ptr is None else scale_ptr + sample * hidden_size + columns
    scale = _load_scale(weight_ptrs, scale_ptrs, column_mask, offset)
    grad_scale = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], dtype=tl.float32)
    grad_shift = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], dtype=tl.float32)
    for tile in tl.range(part, (rows_per_sample - 1) // BLOCK_ROWS + 1, num_parts, num_stages=NUM_STAGES):
        rows = (tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
        row_mask = rows < rows_per_sample
        rows += sample * rows_per_sample
        mask = row_mask & column_mask
        x = tl.load(x_ptr + rows * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_y_ptr + rows * grad_y_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows * num_groups + group, mask=row_mask, other=0.0)
        normalized = x * rstd
        grad_offsets = rows * hidden_size + columns
        if GATING != "none":
            gate = tl.load(gate_ptr + rows * gate_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
            factor, slope = _activate(gate, ACTIVATION)
        if GATING == "first":
            normalized *= factor
        if GATING == "last":
            grad_gate = grad * normalized * scale * slope
            grad *= factor
        if GRAD_SCALE:
            grad_scale += grad * normalized
        if GRAD_SHIFT:
            grad_shift += grad
        grad *= scale
        projection = tl.sum(grad * normalized, axis=1)[:, None] / group_size
        grad = rstd * (grad - normalized * projection)
        if GATING == "first":
            grad_gate = grad * x * slope
            grad *= factor
        if grad_x_ptr is not None:
            tl.store(grad_x_ptr + grad_offsets, grad.to(grad_x_ptr.dtype.element_ty), mask=mask)
        if grad_gate_ptr is not None:
            tl.store(grad_gate_ptr + grad_offsets, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=mask)
    part_offsets = (sample * num_parts + part) * hidden_size + columns
    if GRAD_SCALE:
        tl.store(parts_ptr + part_offsets, tl.sum(grad_scale, axis=0)[None, :], mask=column_mask)
        part_offsets += tl.num_programs(0).to(tl.int64) * group_size
    if GRAD_SHIFT:
        tl.store(parts_ptr + part_offsets, tl.sum(grad_shift, axis=0)[None, :], mask=column_mask)
