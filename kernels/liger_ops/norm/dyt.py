"""DyT, dynamic tanh, which takes the place of a norm: y = gamma * t + beta with t = tanh(alpha * x).

Arithmetic is float32, and y is rounded once. With d = dy * gamma * (1 - t**2),

    dx = alpha * d    dalpha = sum of d * x    dgamma = sum over rows of dy * t    dbeta = sum over rows of dy

where 1 - t**2 = 4 e / (1 + e)**2, e = exp(-2 |alpha * x|), does not cancel. A program of backward walks over
rows and keeps sums of some columns in registers, which are added in a fixed order, so results repeat; t is computed
again. Saved: x, alpha, gamma, beta. Source: arXiv:2503.10622.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_floating_tensors, check_shape, check_single
from liger_ops.autograd import differentiable
from liger_ops.backend import RowLaunch, tanh
from liger_ops.norm.checks import check_columns


def dyt_reference(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """DyT in plain PyTorch, in float32 or wider, rounded once."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = gamma.to(dtype) * torch.tanh(alpha.to(dtype) * x.to(dtype))
    return (y if beta is None else y + beta.to(dtype)).to(x.dtype)


@backend.launch_cache
def choose_launch(num_columns: int) -> RowLaunch:
    """Tiles of 4096 elements, at most 1024 columns wide."""
    block_size = min(1024, triton.next_power_of_2(num_columns))
    return RowLaunch(block_size, 8, block_rows=4096 // block_size)


@triton.jit
def _load_columns(ptr, columns, mask):
    return tl.load(ptr + columns, mask=mask, other=0.0).to(tl.float32)


@backend.Kernel
def _forward_kernel(
    x_ptr,  # [num_rows, num_columns]
    alpha_ptr,  # [1]
    gamma_ptr,  # [num_columns]
    beta_ptr,  # [num_columns] or None
    y_ptr,  # [num_rows, num_columns], contiguous
    x_row_stride,
    num_rows,
    num_columns,
    num_parts,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program computes one tile."""
    rows = ((tl.program_id(0) % num_parts).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    columns = (tl.program_id(0) // num_parts * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE))[None, :]
    mask = (rows < num_rows) & (columns < num_columns)
    x = tl.load(x_ptr + rows * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    y = _load_columns(gamma_ptr, columns, columns < num_columns) * tanh(tl.load(alpha_ptr).to(tl.float32) * x)
    if beta_ptr is not None:
        y += _load_columns(beta_ptr, columns, columns < num_columns)
    tl.store(y_ptr + rows * num_columns + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@backend.Kernel
def _backward_kernel(
    x_ptr,  # [num_rows, num_columns]
    grad_y_ptr,  # [num_rows, num_columns]
    alpha_ptr,  # [1]
    gamma_ptr,  # [num_columns]
    grad_x_ptr,  # [num_rows, num_columns], contiguous, or None
    alpha_parts_ptr,  # [num_programs]
    parts_ptr,  # [2, num_parts, num_columns], of gamma and of beta
    x_row_stride,
    grad_y_row_stride,
    num_rows,
    num_columns,
    num_parts,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program takes a block of columns of every num_parts-th tile of rows: grad_x and sums."""
    part = tl.program_id(0) % num_parts
    columns = (tl.program_id(0) // num_parts * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE))[None, :]
    column_mask = columns < num_columns
    alpha = tl.load(alpha_ptr).to(tl.float32)
    gamma = _load_columns(gamma_ptr, columns, column_mask)
    grad_alpha = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], dtype=tl.float32)
    grad_gamma = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], dtype=tl.float32)
    grad_beta = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], dtype=tl.float32)
    for tile in tl.range(part, (num_rows - 1) // BLOCK_ROWS + 1, num_parts, num_stages=2):
        rows = (tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
        mask = (rows < num_rows) & column_mask
        x = tl.load(x_ptr + rows * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_y_ptr + rows * grad_y_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        grad_beta += grad
        grad_gamma += grad * tanh(alpha * x)
        decay = tl.exp(-2.0 * tl.abs(alpha * x))
        grad *= gamma * (4.0 * decay / ((1.0 + decay) * (1.0 + decay)))
        grad_alpha += grad * x
        if grad_x_ptr is not None:
            grad_x = (alpha * grad).to(grad_x_ptr.dtype.element_ty)
            tl.store(grad_x_ptr + rows * num_columns + columns, grad_x, mask=mask)
    tl.store(alpha_parts_ptr + tl.program_id(0), tl.sum(grad_alpha))
    part_ptrs = parts_ptr + part * num_columns + columns
    tl.store(part_ptrs, tl.sum(grad_gamma, axis=0)[None, :], mask=column_mask)
    tl.store(part_ptrs + num_parts * num_columns, tl.sum(grad_beta, axis=0)[None, :], mask=column_mask)


def _forward(outputs: list[Tensor], x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> None:
    launch = choose_launch(x.shape[-1])
    num_tiles, num_blocks = launch.num_programs(x.numel() // x.shape[-1]), -(-x.shape[-1] // launch.block_size)
    beta = None if beta is None else beta.contiguous()
    pointers = {"alpha_ptr": alpha, "gamma_ptr": gamma.contiguous(), "beta_ptr": beta, "y_ptr": outputs[0]}
    launch.run(_forward_kernel, num_tiles * num_blocks, {"x": x}, num_parts=num_tiles, **pointers)


def _backward(gradients: Any, grad_y: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> None:
    launch = choose_launch(x.shape[-1])
    num_blocks = -(-x.shape[-1] // launch.block_size)
    num_tiles = launch.num_programs(x.numel() // x.shape[-1])
    num_parts = min(num_tiles, max(1, 4 * backend.hardware(x.device).multiprocessors // num_blocks))
    parts = x.new_empty((2, num_parts, x.shape[-1]), dtype=torch.float32)
    alpha_parts = parts.new_empty(num_parts * num_blocks)
    grad_x, *others = gradients
    pointers = {"alpha_ptr": alpha, "gamma_ptr": gamma.contiguous(), "grad_x_ptr": grad_x}
    pointers |= {"alpha_parts_ptr": alpha_parts, "parts_ptr": parts}
    rows = {"x": x, "grad_y": grad_y}
    launch.run(_backward_kernel, num_parts * num_blocks, rows, num_parts=num_parts, **pointers)
    for gradient, each in zip(others, (alpha_parts, *parts), strict=True):
        if gradient is not None:
            gradient.copy_(each.sum(dim=0))


_compute = differentiable("dyt", dyt_reference, _forward, _backward)


def dyt(input: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None = None) -> Tensor:
    """Returns ``gamma * tanh(alpha * input) + beta``: dynamic tanh, which takes the place of a norm.

    Args:
        input: ``[*, hidden_size]``. Rows may lie apart in memory; they are read in place.
        alpha: One number, ``[1]`` or ``[]``.
        gamma: ``[hidden_size]``.
        beta: ``[hidden_size]``; None for 0.

    Returns:
        A contiguous tensor of input's shape and dtype.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point.
        ValueError: If shapes or devices do not fit together.
    """
    check_floating_tensors("input", input, optional=False, alpha=alpha, gamma=gamma)
    check_floating_tensors("input", input, beta=beta)
    hidden_size = check_columns(input)
    check_single(alpha=alpha)
    check_shape("gamma", gamma, (hidden_size,), "hidden_size")
    check_shape("beta", beta, (hidden_size,), "hidden_size")
    return _compute(input, alpha, gamma, beta, ())
