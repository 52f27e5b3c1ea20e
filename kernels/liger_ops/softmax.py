"""Softmax and sparsemax over the last dimension: y = exp(x) / sum(exp(x)), and y = max(x - tau, 0), whose sum is 1.

Both are of z = x - max(x), in float32, rounded once. The support of sparsemax, where z > tau, is found without sorting:
tau = (sum over the support of z - 1) / count, first of all z > -1, outside of which it cannot be, then of all z > tau,
until nothing more falls out (Michelot, 1986). It ends after few rounds, in which the row stays in registers.
With S the support, all of the row for softmax,

    dx = y * (dy - sum(y * dy))            for softmax
    dx = dy - mean over S of dy, on S      for sparsemax, 0 elsewhere

With a causal mask, rows are those of square matrices: columns after the diagonal are not read, and their results are 0.

Saved: y. Sources: arXiv:1602.02068 (sparsemax).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_floating, check_floating_dtype, check_integer, wrong_value
from liger_ops.autograd import differentiable


def softmax_reference(x: Tensor, is_sparse: bool, is_causal: bool = False) -> Tensor:
    """Softmax or sparsemax in plain PyTorch, in float32 or wider, rounded once; sparsemax by sorting."""
    if is_causal:
        future = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        return softmax_reference(x.masked_fill(future, -torch.inf), is_sparse).tril()  # also of a row with NaN
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not is_sparse:
        return wide.softmax(dim=-1).to(x.dtype)
    top = wide.detach().amax(dim=-1, keepdim=True)
    z = wide - top
    falling = z.sort(dim=-1, descending=True).values
    totals = falling.cumsum(dim=-1) - 1
    counts = torch.arange(1, x.shape[-1] + 1, device=x.device)
    count = (counts * falling > totals).sum(dim=-1, keepdim=True).clamp(min=1)  # 0 of a row with NaN
    tau = totals.gather(-1, count - 1) / count
    return ((1 + 0 * top) * torch.where(z <= tau, 0.0, z - tau)).to(x.dtype)  # a row with NaN has NaN gradients too


MAX_COLUMNS = 32768
"""That registers hold: longer rows run in PyTorch."""


@triton.jit
def _sparsemax(z):
    """Of z = x - max(x)."""
    support = z > -1.0
    count = tl.sum(support.to(tl.float32), axis=1)[:, None]
    tau = (tl.sum(tl.where(support, z, 0.0), axis=1)[:, None] - 1.0) / count
    shrinks = 1
    while shrinks > 0:
        support = support & (z > tau)
        remaining = tl.sum(support.to(tl.float32), axis=1)[:, None]
        shrinks = tl.max((remaining < count).to(tl.int32))
        count = remaining
        tau = (tl.sum(tl.where(support, z, 0.0), axis=1)[:, None] - 1.0) / count
    has_nan = tl.max((z != z).to(tl.int32), axis=1)[:, None] > 0
    return tl.where(has_nan, float("nan"), tl.where(support & (z > tau), z - tau, 0.0))


@triton.jit
def _rows_of_tile(num_rows, num_columns, CAUSAL: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Rows and columns of this program's tile, which elements exist, and which of them are not masked."""
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    columns = tl.arange(0, BLOCK_SIZE)[None, :]
    exists = (rows < num_rows) & (columns < num_columns)
    return rows, columns, exists, exists & (columns <= rows % num_columns) if CAUSAL else exists


@backend.Kernel
def _forward_kernel(
    x_ptr,  # [num_rows, num_columns]
    y_ptr,  # [num_rows, num_columns], contiguous
    x_row_stride,
    num_rows,
    num_columns,
    SPARSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program computes BLOCK_ROWS rows."""
    rows, columns, exists, mask = _rows_of_tile(num_rows, num_columns, CAUSAL, BLOCK_ROWS, BLOCK_SIZE)
    x = tl.load(x_ptr + rows * x_row_stride + columns, mask=mask, other=float("-inf")).to(tl.float32)
    x = tl.where(rows < num_rows, x, 0.0)  # so that the maximum of rows that do not exist is finite
    z = x - tl.max(x, axis=1)[:, None]
    if SPARSE:
        y = _sparsemax(z)
    else:
        numerator = tl.exp(z)
        y = numerator / tl.sum(numerator, axis=1)[:, None]
    if CAUSAL:
        y = tl.where(mask, y, 0.0)  # also of a row with NaN
    tl.store(y_ptr + rows * num_columns + columns, y.to(y_ptr.dtype.element_ty), mask=exists)


@backend.Kernel
def _backward_kernel(
    y_ptr,  # [num_rows, num_columns], contiguous
    grad_y_ptr,  # [num_rows, num_columns]
    grad_x_ptr,  # as y_ptr
    grad_y_row_stride,
    num_rows,
    num_columns,
    SPARSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program computes the gradient of BLOCK_ROWS rows."""
    rows, columns, exists, mask = _rows_of_tile(num_rows, num_columns, CAUSAL, BLOCK_ROWS, BLOCK_SIZE)
    y = tl.load(y_ptr + rows * num_columns + columns, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_y_ptr + rows * grad_y_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if SPARSE:
        count = tl.sum((y != 0.0).to(tl.float32), axis=1)[:, None]
        mean = tl.sum(tl.where(y == 0.0, 0.0, grad), axis=1)[:, None] / count
        grad = tl.where(y == 0.0, 0.0, grad - mean) + (y - y)  # NaN where y is
    else:
        grad = y * (grad - tl.sum(grad * y, axis=1)[:, None])
    if CAUSAL:
        grad = tl.where(mask, grad, 0.0)
    tl.store(grad_x_ptr + rows * num_columns + columns, grad.to(grad_x_ptr.dtype.element_ty), mask=exists)


def _launch(kernel: Any, rows: dict[str, Tensor], is_sparse: bool, is_causal: bool, **others: Tensor) -> None:
    """Launches a kernel on all rows."""
    (tensor,) = rows.values()
    launch = backend.choose_row_tiles(tensor.shape[-1])
    num_programs = launch.num_programs(tensor.numel() // tensor.shape[-1])
    launch.run(kernel, num_programs, rows, SPARSE=is_sparse, CAUSAL=is_causal, **others)


probabilities = differentiable(
    "softmax",
    softmax_reference,
    lambda outputs, x, *options: _launch(_forward_kernel, {"x": x}, *options, y_ptr=outputs[0]),
    lambda gradients, grad_y, y, *options: _launch(
        _backward_kernel, {"grad_y": grad_y}, *options, y_ptr=y, grad_x_ptr=gradients[0]
    ),
    keeps_inputs=False,
    fits=lambda x, *_: x.shape[-1] <= MAX_COLUMNS,
)
"""Softmax or sparsemax of ``[*, num_columns]``; options: is_sparse, is_causal (of square matrices)."""


def _of_last_dim(input: Tensor, dim: int, is_sparse: bool) -> Tensor:
    check_floating("input", input)
    check_integer("dim", dim)
    if input.dim() == 0 or input.shape[-1] == 0:
        raise wrong_value("input", "a tensor of at least one dimension, the last not empty", input)
    if dim not in (-1, input.dim() - 1):
        raise wrong_value("dim", f"the last one, -1 or {input.dim() - 1}", dim)
    return probabilities(input, (is_sparse, False))


def softmax(input: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> Tensor:
    """Returns ``exp(input) / sum(exp(input))`` over the last dimension, as ``F.softmax`` does.

    Args:
        input: ``[*, num_columns]``, in any floating dtype. Rows may lie apart in memory; they are read in place.
        dim: The last dimension.
        dtype: That input is converted to before; None leaves it.

    Returns:
        A contiguous tensor of input's shape and dtype.

    Raises:
        TypeError: If input is no tensor, or not real and floating-point, dim no integer, or dtype no such dtype.
        ValueError: If input has no columns, or dim is not the last dimension.
    """
    check_floating("input", input)
    check_floating_dtype("dtype", dtype)
    return _of_last_dim(input if dtype is None else input.to(dtype), dim, False)


def sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    """Returns the probabilities nearest to ``input``, most of them 0: its projection onto the simplex, by rows.

    Args, returns and raises as :func:`softmax`, without dtype.
    """
    return _of_last_dim(input, dim, True)
