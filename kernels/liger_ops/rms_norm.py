"""RMSNorm: y = x * rstd * (offset + weight), rstd = 1 / sqrt(mean(x**2) + eps).

Statistics, products and the weight gradient are float32 for every half-precision input. ``casting`` says where rounding
happens: "gemma" rounds the result once, "llama" rounds x * rstd to x's dtype before the weight is applied. With
n = x * rstd and s = offset + weight, the gradients are

    dx = rstd * (dy * s - n * mean(dy * s * n))        dweight = sum over rows of dy * n

The backward kernel runs a fixed number of programs, each walking over many rows and keeping its part of dweight in
registers; the parts are added up in a fixed order, so results repeat. Saved: x, weight, rstd (4 bytes a row).
Source: arXiv:1910.07467.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_ops import backend

Casting = Literal["gemma", "llama"]
CASTINGS: tuple[Casting, ...] = get_args(Casting)


class RMSNormOptions(NamedTuple):
    """What one call computes, besides its tensors."""

    hidden_size: int
    eps: float
    offset: float
    casting: Casting


def rms_norm_reference(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, *, eps: float, offset: float, casting: Casting
) -> Tensor:
    """RMSNorm over the last ``len(normalized_shape)`` dimensions in plain PyTorch, in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean_square = wide.square().mean(dim=tuple(range(-len(normalized_shape), 0)), keepdim=True)
    normalized = wide * torch.rsqrt(mean_square + eps)
    if casting == "llama":
        normalized = normalized.to(x.dtype)
    if weight is None:
        return normalized.to(x.dtype)
    scale = offset + weight.to(torch.promote_types(weight.dtype, torch.float32))
    return (normalized * scale).to(_output_dtype(x, weight, casting))


def _output_dtype(x: Tensor, weight: Tensor | None, casting: Casting) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if casting == "llama" and weight is not None else x.dtype


@dataclass(frozen=True)
class RMSNormLaunch:
    """Tile of rows that a program holds at a time, how many programs share the tiles, and pipeline depth."""

    block_rows: int
    block_size: int
    num_warps: int
    num_programs: int
    num_stages: int = 1


def choose_forward_launch(num_rows: int, hidden_size: int) -> RMSNormLaunch:
    """A whole row in one tile, or as many short ones as make 2048 elements; one tile a program.

    On an H200 in bfloat16, rows of 128 to 16384 columns: 3.5 to 4.0 TB/s where a copy reaches 3.9 to 4.2.
    """
    block_size = triton.next_power_of_2(hidden_size)
    block_rows = max(1, 2048 // block_size)
    num_warps = min(16, max(4, block_size // 512))
    return RMSNormLaunch(block_rows, block_size, num_warps, num_programs=triton.cdiv(num_rows, block_rows))


_TILE_BYTES = 16384


def choose_backward_launch(
    num_rows: int, hidden_size: int, element_size: int, num_multiprocessors: int
) -> RMSNormLaunch:
    """Tiles of 16 KB, or of one longer row; one program a multiprocessor, which loads tiles ahead while they fit.

    On an H200 in bfloat16, 16384 rows (8192 of 16384 columns), where a copy reaches 3.8 to 4.2 TB/s:

        columns                  128*   2048   4096   5120   8192  16384      * 262144 rows
        nothing loaded ahead     3.1    3.1    3.5    3.0    3.5    3.5
        2 tiles ahead            3.3    3.3    3.7    3.3    4.0    2.6
        3 tiles ahead            3.2    3.2    3.6    3.8    3.8

    Three tiles of x and of the gradient take 97 KB of shared memory, of which GPUs since Ampere have 99 to 227. Past
    16384 columns registers overflow: still right, but several times slower.
    """
    block_size = triton.next_power_of_2(hidden_size)
    block_rows = max(1, _TILE_BYTES // (block_size * element_size))
    if block_rows * block_size * element_size > _TILE_BYTES:
        num_stages = 1
    else:
        partly_filled = block_rows * hidden_size * element_size <= 0.75 * _TILE_BYTES
        num_stages = 4 if partly_filled else 3
    return RMSNormLaunch(
        block_rows=block_rows,
        block_size=block_size,
        num_warps=8 if block_size <= 16384 else 32,
        num_programs=min(triton.cdiv(num_rows, block_rows), num_multiprocessors),
        num_stages=num_stages,
    )


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    # Off CUDA only Triton's interpreter gets here; two programs are the fewest that share the work.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit
def _rms_norm_forward_kernel(
    x_ptr,  # [num_rows, hidden_size]
    weight_ptr,  # [hidden_size] if HAS_WEIGHT
    y_ptr,  # [num_rows, hidden_size], contiguous
    rstd_ptr,  # [num_rows]
    x_row_stride,
    num_rows,
    hidden_size,
    eps,
    offset,
    HAS_WEIGHT: tl.constexpr,
    ROUND_NORMALIZED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program normalises BLOCK_ROWS rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_SIZE)
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (columns < hidden_size)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_row_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / hidden_size + eps)
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    y = x * rstd[:, None]
    if ROUND_NORMALIZED:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=columns < hidden_size, other=0.0).to(tl.float32)
        y *= (offset + weight)[None, :]
    y_ptrs = y_ptr + rows[:, None] * hidden_size + columns[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_backward_kernel(
    grad_output_ptr,  # [num_rows, hidden_size]
    x_ptr,  # [num_rows, hidden_size]
    weight_ptr,  # [hidden_size] if HAS_WEIGHT
    rstd_ptr,  # [num_rows]
    grad_x_ptr,  # [num_rows, hidden_size], contiguous, written if GRAD_X
    grad_weight_parts_ptr,  # [num_programs, hidden_size], float32, written if GRAD_WEIGHT
    grad_output_row_stride,
    x_row_stride,
    num_rows,
    hidden_size,
    offset,
    HAS_WEIGHT: tl.constexpr,
    GRAD_X: tl.constexpr,
    GRAD_WEIGHT: tl.constexpr,
    ROUND_NORMALIZED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program takes every num_programs-th tile of BLOCK_ROWS rows: their grad_x, and their sum for grad_weight."""
    columns = tl.arange(0, BLOCK_SIZE)
    column_mask = columns < hidden_size
    if HAS_WEIGHT:
        scale = offset + tl.load(weight_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
    num_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    grad_weight = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=NUM_STAGES):
        rows = (tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        row_mask = rows < num_rows
        mask = row_mask[:, None] & column_mask[None, :]
        grad_output_ptrs = grad_output_ptr + rows[:, None] * grad_output_row_stride + columns[None, :]
        grad_output = tl.load(grad_output_ptrs, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + rows[:, None] * x_row_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)[:, None]
        normalized = x * rstd
        if GRAD_WEIGHT:
            if ROUND_NORMALIZED:
                grad_weight += grad_output * normalized.to(x_ptr.dtype.element_ty).to(tl.float32)
            else:
                grad_weight += grad_output * normalized
        if GRAD_X:
            if HAS_WEIGHT:
                grad_output *= scale[None, :]
            projection = tl.sum(grad_output * normalized, axis=1)[:, None] / hidden_size
            grad_x = rstd * (grad_output - normalized * projection)
            grad_x_ptrs = grad_x_ptr + rows[:, None] * hidden_size + columns[None, :]
            tl.store(grad_x_ptrs, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    if GRAD_WEIGHT:
        part_ptrs = grad_weight_parts_ptr + tl.program_id(0).to(tl.int64) * hidden_size + columns
        tl.store(part_ptrs, tl.sum(grad_weight, axis=0), mask=column_mask)


def _as_rows(tensor: Tensor, hidden_size: int) -> Tensor:
    """Views ``tensor`` as [num_rows, hidden_size] with unit column stride, copying only where it must."""
    rows = tensor.reshape(-1, hidden_size)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _rms_norm_forward_fake(
    x: Tensor, weight: Tensor | None, hidden_size: int, eps: float, offset: float, casting: Casting
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=_output_dtype(x, weight, casting))
    rstd = x.new_empty(x.numel() // hidden_size, dtype=torch.float32)
    return y, rstd


@backend.register_op(
    "rms_norm_forward(Tensor x, Tensor? weight, SymInt hidden_size, float eps, float offset, str casting)"
    " -> (Tensor, Tensor)",
    fake=_rms_norm_forward_fake,
)
def _rms_norm_forward(
    x: Tensor, weight: Tensor | None, hidden_size: int, eps: float, offset: float, casting: Casting
) -> tuple[Tensor, Tensor]:
    """Returns y of x's shape and rstd, one float32 a row."""
    y, rstd = _rms_norm_forward_fake(x, weight, hidden_size, eps, offset, casting)
    num_rows = rstd.shape[0]
    if num_rows == 0:
        return y, rstd
    rows = _as_rows(x, hidden_size)
    launch = choose_forward_launch(num_rows, hidden_size)
    _rms_norm_forward_kernel[(launch.num_programs,)](
        x_ptr=rows,
        weight_ptr=None if weight is None else weight.contiguous(),
        y_ptr=y,
        rstd_ptr=rstd,
        x_row_stride=rows.stride(0),
        num_rows=num_rows,
        hidden_size=hidden_size,
        eps=eps,
        offset=offset,
        HAS_WEIGHT=weight is not None,
        ROUND_NORMALIZED=casting == "llama",
        BLOCK_ROWS=launch.block_rows,
        BLOCK_SIZE=launch.block_size,
        num_warps=launch.num_warps,
    )
    return y, rstd


def _rms_norm_backward_fake(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    hidden_size: int,
    offset: float,
    casting: Casting,
    needs_grad_x: bool,
    needs_grad_weight: bool,
) -> tuple[Tensor, Tensor]:
    grad_x = x.new_empty(x.shape if needs_grad_x else 0)
    grad_weight = x.new_empty(0) if weight is None or not needs_grad_weight else weight.new_empty(weight.shape)
    return grad_x, grad_weight


@backend.register_op(
    "rms_norm_backward(Tensor grad_output, Tensor x, Tensor? weight, Tensor rstd, SymInt hidden_size, float offset,"
    " str casting, bool needs_grad_x, bool needs_grad_weight) -> (Tensor, Tensor)",
    fake=_rms_norm_backward_fake,
)
def _rms_norm_backward(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    hidden_size: int,
    offset: float,
    casting: Casting,
    needs_grad_x: bool,
    needs_grad_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and weight; one that is not needed comes back empty."""
    grad_x = x.new_empty(x.shape if needs_grad_x else 0)
    num_rows = rstd.shape[0]
    element_size = max(x.element_size(), grad_output.element_size())
    launch = choose_backward_launch(num_rows, hidden_size, element_size, _num_multiprocessors(x.device))
    grad_weight_parts = rstd.new_empty(launch.num_programs, hidden_size if needs_grad_weight else 0)
    if num_rows > 0:
        grad_output_rows, rows = _as_rows(grad_output, hidden_size), _as_rows(x, hidden_size)
        _rms_norm_backward_kernel[(launch.num_programs,)](
            grad_output_ptr=grad_output_rows,
            x_ptr=rows,
            weight_ptr=None if weight is None else weight.contiguous(),
            rstd_ptr=rstd,
            grad_x_ptr=grad_x,
            grad_weight_parts_ptr=grad_weight_parts,
            grad_output_row_stride=grad_output_rows.stride(0),
            x_row_stride=rows.stride(0),
            num_rows=num_rows,
            hidden_size=hidden_size,
            offset=offset,
            HAS_WEIGHT=weight is not None,
            GRAD_X=needs_grad_x,
            GRAD_WEIGHT=needs_grad_weight,
            ROUND_NORMALIZED=casting == "llama",
            BLOCK_ROWS=launch.block_rows,
            BLOCK_SIZE=launch.block_size,
            NUM_STAGES=launch.num_stages,
            num_warps=launch.num_warps,
        )
    if weight is None or not needs_grad_weight:
        return grad_x, x.new_empty(0)
    return grad_x, grad_weight_parts.sum(dim=0).to(weight.dtype).view(weight.shape)


class RMSNormFunction(torch.autograd.Function):
    """Ties the two ops together for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, options: RMSNormOptions) -> Tensor:
        hidden_size, eps, offset, casting = options
        y, rstd = _rms_norm_forward(x, weight, hidden_size, eps, offset, casting)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options = options
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden_size, _, offset, casting = ctx.options
        needs_grad_x, needs_grad_weight, _ = ctx.needs_input_grad
        grad_x, grad_weight = _rms_norm_backward(
            grad_output, *ctx.saved_tensors, hidden_size, offset, casting, needs_grad_x, needs_grad_weight
        )
        return grad_x if needs_grad_x else None, grad_weight if needs_grad_weight else None, None


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    casting: Casting = "gemma",
) -> Tensor:
    """Returns ``input * rstd * (offset + weight)``, ``rstd = 1 / sqrt(mean(input**2) + eps)``; by default `F.rms_norm`.

    Args:
        input: ``[*, *normalized_shape]``, typically ``[batch_size, seq_len, hidden_size]``.
        normalized_shape: The trailing dimensions that the mean goes over.
        weight: Of ``normalized_shape``; None leaves the normalised input as it is.
        eps: None means the machine epsilon of the arithmetic, as in ``F.rms_norm``: float32's for half precision.
        offset: Added to the weight; 1 for models whose weights are stored as deviations from one (Gemma).
        casting: "gemma" computes in float32, rounds once and returns input's dtype. "llama" rounds the normalised value
            to input's dtype, then applies the weight and returns the promoted dtype of both.

    Returns:
        A contiguous tensor of input's shape.

    Raises:
        ValueError: If the shapes do not fit together, casting is unknown, or offset is given without a weight.
    """
    shape = tuple(normalized_shape)
    if not shape or 0 in shape or tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"normalized_shape must be input's trailing sizes, positive and at least one, got {shape} for input of"
            f" shape {tuple(input.shape)}"
        )
    if weight is not None and tuple(weight.shape) != shape:
        raise ValueError(f"weight must have shape normalized_shape = {shape}, got {tuple(weight.shape)}")
    if weight is None and offset != 0.0:
        raise ValueError(f"offset is added to weight, so it must be 0 without one, got {offset}")
    if casting not in CASTINGS:
        raise ValueError(f"casting must be one of {', '.join(CASTINGS)}, got {casting!r}")
    if eps is None:
        eps = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps
    if not backend.use_triton(input) or torch.float64 in (input.dtype, input.dtype if weight is None else weight.dtype):
        return rms_norm_reference(input, shape, weight, eps=eps, offset=offset, casting=casting)
    return RMSNormFunction.apply(input, weight, RMSNormOptions(math.prod(shape), eps, offset, casting))
