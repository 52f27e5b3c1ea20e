"""Coefficients of manifold-constrained hyper-connections, of each token's n streams: h_pre, h_post and h_res.

    mix = (x @ phi) * r, r = 1 / sqrt(mean(x**2) + eps), of all streams of a token as one row of K numbers
    l = mix * scale + b, of which n columns are h_pre's, n h_post's, n * n h_res'
    h_pre = sigmoid(l) + pre_eps    h_post = post_mult * sigmoid(l)    h_res = sinkhorn(softmax(l) + sinkhorn_eps)

Sinkhorn divides columns, then rows and columns tmax - 1 times, by their sum + sinkhorn_eps. Its backward computes these
divisors again, and finds each matrix from the one after it, times its divisors. Products with phi, and mean(x**2), read
x once in each direction; they accumulate in float32 and, if x and phi have one dtype, multiply in it. Between the two,
n * (n + 2) numbers per token in float32, is plain PyTorch. Source: arXiv:2512.24880.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import (
    check_floating_tensors,
    check_integer,
    check_number,
    check_shape,
    check_single,
    wrong_value,
)
from liger_ops.autograd import differentiable

MAX_STREAMS = 15
"""Whose columns fit tiles of 256: more run in PyTorch."""


def projection_reference(x: Tensor, phi: Tensor) -> Tensor:
    """``[*, num_columns + 1]``: the product with phi, and the mean square, in float32 or wider."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, phi.dtype), torch.float32)
    rows = x.to(dtype).flatten(-2)
    with backend.without_autocast(x.device.type):
        return torch.cat((rows @ phi.to(dtype), rows.square().mean(-1, keepdim=True)), dim=-1)


def sinkhorn_reference(matrix: Tensor, tmax: int, eps: float) -> Tensor:
    """Matrices ``[*, n, n]``, divided in plain PyTorch."""
    for dim in (-2, *(tmax - 1) * (-1, -2)):
        matrix = matrix / (matrix.sum(dim, keepdim=True) + eps)
    return matrix


@backend.Kernel
def _project_kernel(
    x_ptr,  # [num_rows, length], contiguous, as are all
    phi_ptr,  # [length, num_columns], in whose dtype products multiply
    y_ptr,  # [num_rows, num_columns + 1]
    num_rows,
    length,
    num_columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program computes BLOCK_ROWS rows."""
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    columns = tl.arange(0, BLOCK_COLUMNS)[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=tl.float32)
    lost = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=tl.float32)
    squares = tl.zeros([BLOCK_ROWS, BLOCK_LENGTH], dtype=tl.float32)
    for start in range(0, length, BLOCK_LENGTH):
        inner = start + tl.arange(0, BLOCK_LENGTH)
        x_mask = (rows < num_rows) & (inner[None, :] < length)
        x = tl.load(x_ptr + rows * length + inner[None, :], mask=x_mask, other=0.0)
        phi_mask = (inner[:, None] < length) & (columns < num_columns)
        phi = tl.load(phi_ptr + inner[:, None] * num_columns + columns, mask=phi_mask, other=0.0)
        if phi.dtype == tl.float32:  # compensated: rows have thousands of terms, which one sum would add in turn
            block = tl.dot(x.to(phi.dtype), phi, input_precision="ieee") - lost
            lost = total + block - total - block
            total += block
        else:
            total = tl.dot(x.to(phi.dtype), phi, total, input_precision="ieee")
        wide = x.to(tl.float32)
        squares += wide * wide
    y_rows = y_ptr + rows * (num_columns + 1)
    tl.store(y_rows + columns, total, mask=(rows < num_rows) & (columns < num_columns))
    tl.store(y_rows + num_columns, tl.sum(squares, axis=1)[:, None] / length, mask=rows < num_rows)


@backend.Kernel
def _project_backward_kernel(
    x_ptr,  # [num_rows, length], contiguous, as are all
    phi_ptr,  # [length, num_columns], in whose dtype products multiply
    grad_y_ptr,  # [num_rows, num_columns + 1]
    grad_x_ptr,  # [num_rows, length], or None
    parts_ptr,  # [num_parts, length, num_columns], of the gradient of phi, or None
    num_rows,
    length,
    num_columns,
    num_parts,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program takes BLOCK_LENGTH columns of x and every num_parts-th BLOCK_ROWS rows."""
    part = tl.program_id(0) % num_parts
    inner = (tl.program_id(0) // num_parts) * BLOCK_LENGTH + tl.arange(0, BLOCK_LENGTH)
    columns = tl.arange(0, BLOCK_COLUMNS)[None, :]
    phi_offsets = inner[:, None] * num_columns + columns
    phi_mask = (inner[:, None] < length) & (columns < num_columns)
    phi = tl.load(phi_ptr + phi_offsets, mask=phi_mask, other=0.0)
    total = tl.zeros([BLOCK_LENGTH, BLOCK_COLUMNS], dtype=tl.float32)
    for start in range(part * BLOCK_ROWS, num_rows, num_parts * BLOCK_ROWS):
        rows = (tl.cast(start, tl.int64) + tl.arange(0, BLOCK_ROWS))[:, None]
        offsets = rows * length + inner[None, :]
        x_mask = (rows < num_rows) & (inner[None, :] < length)
        x = tl.load(x_ptr + offsets, mask=x_mask, other=0.0)
        grad_rows = grad_y_ptr + rows * (num_columns + 1)
        grad = tl.load(grad_rows + columns, mask=(rows < num_rows) & (columns < num_columns), other=0.0).to(phi.dtype)
        if grad_x_ptr is not None:
            slope = tl.load(grad_rows + num_columns, mask=rows < num_rows, other=0.0) * (2.0 / length)
            grad_x = tl.dot(grad, tl.trans(phi), input_precision="ieee") + slope * x.to(tl.float32)
            tl.store(grad_x_ptr + offsets, grad_x.to(grad_x_ptr.dtype.element_ty), mask=x_mask)
        if parts_ptr is not None:
            total = tl.dot(tl.trans(x.to(phi.dtype)), grad, total, input_precision="ieee")
    if parts_ptr is not None:
        tl.store(parts_ptr + tl.cast(part, tl.int64) * length * num_columns + phi_offsets, total, mask=phi_mask)


def _project_arguments(x: Tensor, phi: Tensor) -> dict[str, Any]:
    """What both kernels take: tiles of 32 rows and 8 KB of phi, but 16 columns at least, as products need."""
    length, num_columns = phi.shape
    dtype = x.dtype if x.dtype == phi.dtype else torch.float32
    block_columns = max(16, backend.next_power_of_2(num_columns))
    return {
        "x_ptr": x.contiguous(),
        "phi_ptr": phi.to(dtype).contiguous(),
        "num_rows": x.numel() // length,
        "length": length,
        "num_columns": num_columns,
        "BLOCK_ROWS": 32,
        "BLOCK_LENGTH": max(16, 8192 // (block_columns * dtype.itemsize)),
        "BLOCK_COLUMNS": block_columns,
        "num_warps": 4,
    }


def _project_forward(outputs: list[Tensor], x: Tensor, phi: Tensor) -> None:
    _project_kernel.launch(-(-x.shape[:-2].numel() // 32), y_ptr=outputs[0], **_project_arguments(x, phi))


def _project_backward(gradients: Any, grad_y: Tensor, x: Tensor, phi: Tensor) -> None:
    """Parts of phi's gradient are added in a fixed order."""
    grad_x, grad_phi = gradients
    arguments = _project_arguments(x, phi)
    num_blocks = -(-phi.shape[0] // arguments["BLOCK_LENGTH"])
    wanted = -(-2 * backend.hardware(x.device).multiprocessors // num_blocks)
    num_parts = min(wanted, -(-arguments["num_rows"] // 32))
    parts = None if grad_phi is None else x.new_empty((num_parts, *phi.shape), dtype=torch.float32)
    tensors = {"grad_y_ptr": grad_y.contiguous(), "grad_x_ptr": grad_x, "parts_ptr": parts}
    _project_backward_kernel.launch(num_blocks * num_parts, num_parts=num_parts, **tensors, **arguments)
    if grad_phi is not None and parts is not None:
        grad_phi.copy_(parts.sum(0))


@backend.Kernel
def _sinkhorn_kernel(
    matrix_ptr,  # [num_rows, n, n], contiguous, as y and its gradient
    y_ptr,  # or the gradient of the matrix
    grad_y_ptr,  # None in forward
    divisors_ptr,  # [num_rows, tmax, 2, n], of rows, 1 at first, and columns, or None
    num_rows,
    n,
    tmax,
    eps,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_STREAMS: tl.constexpr,
):
    """One program divides BLOCK_ROWS matrices, and walks back where there is a gradient."""
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None, None]
    i, j = tl.arange(0, BLOCK_STREAMS)[None, :, None], tl.arange(0, BLOCK_STREAMS)[None, None, :]
    i_mask, j_mask = (rows < num_rows) & (i < n), (rows < num_rows) & (j < n)
    offsets, mask = (rows * n + i) * n + j, i_mask & j_mask
    result = tl.load(matrix_ptr + offsets, mask=mask, other=0.0)
    for step in range(tmax):
        of_rows = tl.where((i < n) & (step > 0), tl.sum(result, axis=2, keep_dims=True) + eps, 1.0)
        result = result / of_rows
        of_columns = tl.where(j < n, tl.sum(result, axis=1, keep_dims=True) + eps, 1.0)
        result = result / of_columns
        if grad_y_ptr is not None:
            divisors = divisors_ptr + (rows * tmax + step) * 2 * n
            tl.store(divisors + i, of_rows, mask=i_mask)
            tl.store(divisors + n + j, of_columns, mask=j_mask)
    if grad_y_ptr is not None:
        tl.debug_barrier()  # divisors may have been stored by other threads
        matrix = result
        result = tl.load(grad_y_ptr + offsets, mask=mask, other=0.0)
        for reverse in range(tmax):
            step = tmax - 1 - reverse
            divisors = divisors_ptr + (rows * tmax + step) * 2 * n
            of_columns = tl.load(divisors + n + j, mask=j_mask, other=1.0)
            result = (result - tl.sum(result * matrix, axis=1, keep_dims=True)) / of_columns
            matrix = matrix * of_columns
            of_rows = tl.load(divisors + i, mask=i_mask, other=1.0)
            product = tl.sum(result * matrix, axis=2, keep_dims=True)
            result = (result - tl.where(step > 0, product, 0.0)) / of_rows
            matrix = matrix * of_rows
    tl.store(y_ptr + offsets, result, mask=mask)


def _launch_sinkhorn(y: Tensor, matrix: Tensor, grad_y: Tensor | None, tmax: int, eps: float) -> None:
    """Writes y, or the gradient of the matrix; in tiles of 1024 elements."""
    n, num_rows = matrix.shape[-1], y.shape[:-2].numel()
    block_streams = backend.next_power_of_2(n)
    block_rows = max(1, 1024 // block_streams**2)
    _sinkhorn_kernel.launch(
        -(-num_rows // block_rows),
        matrix_ptr=matrix.contiguous(),
        y_ptr=y,
        grad_y_ptr=None if grad_y is None else grad_y.contiguous(),
        divisors_ptr=None if grad_y is None else y.new_empty((num_rows, tmax, 2, n)),
        num_rows=num_rows,
        n=n,
        tmax=tmax,
        eps=eps,
        BLOCK_ROWS=block_rows,
        BLOCK_STREAMS=block_streams,
        num_warps=4,
    )


def _fits(x: Tensor, *_: Any) -> bool:
    return x.shape[-2] <= MAX_STREAMS


_project = differentiable(
    "mhc_project",
    projection_reference,
    _project_forward,
    _project_backward,
    allocate=lambda x, phi: [x.new_empty((*x.shape[:-2], phi.shape[1] + 1), dtype=torch.float32)],
    fits=_fits,
)
_sinkhorn = differentiable(
    "mhc_sinkhorn",
    sinkhorn_reference,
    lambda outputs, matrix, *options: _launch_sinkhorn(outputs[0], matrix, None, *options),
    lambda gradients, grad_y, matrix, *options: _launch_sinkhorn(gradients[0], matrix, grad_y, *options),
    fits=_fits,
)


def check_streams(x: Tensor) -> None:
    """Raises unless x is ``[*, num_streams, num_channels]``."""
    if x.dim() < 2 or 0 in x.shape[-2:]:
        raise wrong_value("x", "a tensor of shape [*, num_streams, num_channels], the last two positive", x)


def check_options(tmax: int, post_mult: float, **eps: float) -> None:
    """Raises for an option of :func:`mhc_coeffs` that is of a wrong type or out of range."""
    check_integer("tmax", tmax, at_least=1)
    check_number("post_mult", post_mult)
    for name, value in eps.items():
        check_number(name, value, at_least=0)


def mhc_coeffs(
    x: Tensor,
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the coefficients of hyper-connections, from which :func:`mhc_pre` and :func:`mhc_post_res` compute.

    Args:
        x: ``[*, n, num_channels]``, n streams.
        phi: ``[n * num_channels, n * (n + 2)]``, whose columns are those of h_pre, h_post and h_res, row by row.
        b: ``[n * (n + 2)]``.
        alpha_pre, alpha_post, alpha_res: One number each, ``[1]`` or ``[]``, a factor of its columns.
        tmax: How often rows and columns of h_res are normalized, at least 1.
        rms_eps: Added to the mean squares, at least 0.
        pre_eps: Added to h_pre, at least 0.
        sinkhorn_eps: Added to the softmax and to sums of rows and columns, at least 0.
        post_mult: The largest h_post.

    Returns:
        h_pre ``[*, n]``, h_post ``[*, n]`` and h_res ``[*, n, n]``, whose rows and columns nearly sum to 1, in the
        widest of all tensors' dtypes and float32.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point, or an option no number.
        ValueError: If shapes or devices do not fit together, or an option is out of range.
    """
    alphas = {"alpha_pre": alpha_pre, "alpha_post": alpha_post, "alpha_res": alpha_res}
    check_floating_tensors("x", x, optional=False, phi=phi, b=b, **alphas)
    check_streams(x)
    n, num_channels = x.shape[-2:]
    check_shape("phi", phi, (n * num_channels, n * (n + 2)), "[n * num_channels, n * (n + 2)]")
    check_shape("b", b, (n * (n + 2),), "[n * (n + 2)]")
    check_single(**alphas)
    check_options(tmax, post_mult, rms_eps=rms_eps, pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps)
    scale = torch.cat([alpha.expand(size) for alpha, size in zip(alphas.values(), (n, n, n * n), strict=True)])
    options: Any = tmax, float(sinkhorn_eps)
    y = _project(x, phi, ())
    gates, res = (y[..., :-1] * torch.rsqrt(y[..., -1:] + rms_eps) * scale + b).split([2 * n, n * n], dim=-1)
    pre, post = gates.sigmoid().split(n, dim=-1)
    matrix = res.unflatten(-1, (n, n)).softmax(-1) + sinkhorn_eps
    h_res = _sinkhorn(matrix, options)
    return pre + pre_eps, post * post_mult, h_res
