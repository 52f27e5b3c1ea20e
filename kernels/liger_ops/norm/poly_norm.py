"""PolyNorm: y = w[0] * n3 + w[1] * n2 + w[2] * n1 + b of the normalized powers nk = x**k * rk.

With rk = 1 / sqrt(mean(x**(2 k)) + eps), means over a row and S_k = sum over a row of dy * nk,

    dx = sum over k of w[3 - k] * k * x**(k - 1) * rk * (dy - nk * mean(dy * nk))
    dw[3 - k] = sum over rows of S_k        db = sum of dy

Arithmetic is float32, and y is rounded once. Backward computes the powers and rk again; each of its programs walks over
rows, and its sums are added in a fixed order, so results repeat. Saved: x, w, b. Source: arXiv:2411.03884.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_floating_tensors, check_shape, check_single
from liger_ops.autograd import differentiable
from liger_ops.norm.checks import as_number, check_columns


def poly_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """PolyNorm in plain PyTorch, in float32 or wider, rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = bias.to(wide.dtype)
    for factor, power in zip(weight.to(wide.dtype), (wide * wide * wide, wide * wide, wide), strict=True):
        y = y + factor * (power * torch.rsqrt(power.square().mean(-1, keepdim=True) + eps))
    return y.to(x.dtype)


MAX_COLUMNS = 16384
"""That registers hold: longer rows run in PyTorch."""


@triton.jit
def _rstd(x, num_columns, eps):
    return tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / num_columns + eps)


@triton.jit
def _load_tile(ptr, tile, row_stride, num_rows, num_columns, BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """A tile of rows in float32, their offsets in a contiguous tensor, and which elements exist."""
    rows = (tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    columns = tl.arange(0, BLOCK_SIZE)[None, :]
    mask = (rows < num_rows) & (columns < num_columns)
    x = tl.load(ptr + rows * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    return x, rows * num_columns + columns, mask


@triton.jit
def _load_weights(weight_ptr):
    """Those of the cube, of the square and of x itself."""
    weight3, weight2, weight1 = tl.load(weight_ptr), tl.load(weight_ptr + 1), tl.load(weight_ptr + 2)
    return weight3.to(tl.float32), weight2.to(tl.float32), weight1.to(tl.float32)


@backend.Kernel
def _forward_kernel(
    x_ptr,  # [num_rows, num_columns]
    weight_ptr,  # [3]
    bias_ptr,  # [1]
    y_ptr,  # [num_rows, num_columns], contiguous
    x_row_stride,
    num_rows,
    num_columns,
    eps,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program computes BLOCK_ROWS rows."""
    weight3, weight2, weight1 = _load_weights(weight_ptr)
    x, offsets, mask = _load_tile(x_ptr, tl.program_id(0), x_row_stride, num_rows, num_columns, BLOCK_ROWS, BLOCK_SIZE)
    square = x * x
    cube = square * x
    y = weight3 * (cube * _rstd(cube, num_columns, eps)) + weight2 * (square * _rstd(square, num_columns, eps))
    y += weight1 * (x * _rstd(x, num_columns, eps)) + tl.load(bias_ptr).to(tl.float32)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_of_power(power, grad, num_columns, eps):
    """The gradient of the normalized power, without its weight, with respect to the power; and that of its weight."""
    rstd = _rstd(power, num_columns, eps)
    normalized = power * rstd
    product = tl.sum(grad * normalized, axis=1)[:, None]
    return rstd * (grad - normalized * (product / num_columns)), product


@backend.Kernel
def _backward_kernel(
    x_ptr,  # [num_rows, num_columns]
    grad_y_ptr,  # [num_rows, num_columns]
    weight_ptr,  # [3]
    grad_x_ptr,  # [num_rows, num_columns], contiguous, or None
    parts_ptr,  # [num_programs, 4], of the weights' gradients and the bias's
    x_row_stride,
    grad_y_row_stride,
    num_rows,
    num_columns,
    eps,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program takes every num_programs-th tile of BLOCK_ROWS rows: grad_x and sums."""
    weight3, weight2, weight1 = _load_weights(weight_ptr)
    sum3 = tl.zeros([BLOCK_ROWS, 1], dtype=tl.float32)
    sum2 = tl.zeros([BLOCK_ROWS, 1], dtype=tl.float32)
    sum1 = tl.zeros([BLOCK_ROWS, 1], dtype=tl.float32)
    sum0 = tl.zeros([BLOCK_ROWS, 1], dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), (num_rows - 1) // BLOCK_ROWS + 1, tl.num_programs(0), num_stages=NUM_STAGES):
        x, offsets, mask = _load_tile(x_ptr, tile, x_row_stride, num_rows, num_columns, BLOCK_ROWS, BLOCK_SIZE)
        grad, _, _ = _load_tile(grad_y_ptr, tile, grad_y_row_stride, num_rows, num_columns, BLOCK_ROWS, BLOCK_SIZE)
        square = x * x
        grad3, product3 = _backward_of_power(square * x, grad, num_columns, eps)
        grad2, product2 = _backward_of_power(square, grad, num_columns, eps)
        grad1, product1 = _backward_of_power(x, grad, num_columns, eps)
        sum3 += product3
        sum2 += product2
        sum1 += product1
        sum0 += tl.sum(grad, axis=1)[:, None]
        if grad_x_ptr is not None:
            grad_x = weight3 * grad3 * (3.0 * square) + weight2 * grad2 * (2.0 * x) + weight1 * grad1
            tl.store(grad_x_ptr + offsets, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    part_ptr = parts_ptr + tl.program_id(0) * 4
    tl.store(part_ptr, tl.sum(sum3))
    tl.store(part_ptr + 1, tl.sum(sum2))
    tl.store(part_ptr + 2, tl.sum(sum1))
    tl.store(part_ptr + 3, tl.sum(sum0))


def _forward(outputs: list[Tensor], x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
    launch = backend.choose_row_tiles(x.shape[-1])
    num_tiles = launch.num_programs(x.numel() // x.shape[-1])
    pointers = {"weight_ptr": weight.contiguous(), "bias_ptr": bias, "y_ptr": outputs[0]}
    launch.run(_forward_kernel, num_tiles, {"x": x}, eps=eps, **pointers)


def _backward(gradients: Any, grad_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
    grad_x, grad_weight, grad_bias = gradients
    launch = backend.choose_row_tiles(x.shape[-1])
    num_programs = min(launch.num_programs(x.numel() // x.shape[-1]), 4 * backend.hardware(x.device).multiprocessors)
    parts = x.new_empty((num_programs, 4), dtype=torch.float32)
    pointers = {"weight_ptr": weight.contiguous(), "grad_x_ptr": grad_x, "parts_ptr": parts}
    rows = {"x": x, "grad_y": grad_y}
    launch.run(_backward_kernel, num_programs, rows, eps=eps, NUM_STAGES=launch.num_stages, **pointers)
    sums = parts.sum(dim=0)
    if grad_weight is not None:
        grad_weight.copy_(sums[:3])
    if grad_bias is not None:
        grad_bias.copy_(sums[3])


_compute = differentiable(
    "poly_norm", poly_norm_reference, _forward, _backward, fits=lambda x, *_: x.shape[-1] <= MAX_COLUMNS
)


def poly_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """Returns ``weight[0] * rms_norm(input**3) + weight[1] * rms_norm(input**2) + weight[2] * rms_norm(input) + bias``.

    Args:
        input: ``[*, hidden_size]``. Rows may lie apart in memory; they are read in place.
        weight: ``[3]``, of the cube, of the square and of input itself.
        bias: One number, ``[1]`` or ``[]``.
        eps: Added to the mean squares, at least 0.

    Returns:
        A contiguous tensor of input's shape and dtype.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point, or eps no number.
        ValueError: If shapes or devices do not fit together, or eps is negative or not finite.
    """
    check_floating_tensors("input", input, optional=False, weight=weight, bias=bias)
    check_columns(input)
    check_shape("weight", weight, (3,))
    check_single(bias=bias)
    eps = as_number("eps", eps, at_least=0)
    return _compute(input, weight, bias, (eps,))
