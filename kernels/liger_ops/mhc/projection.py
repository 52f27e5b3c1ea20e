"""The product of streams and phi, times 1 / RMS of all streams of a token: mix = (x @ phi) * r, and its backward.

A row x has K numbers, r = 1 / sqrt(mean(x**2) + eps), and gm is the gradient of mix:

    dx = r * (gm @ phi.T - x * <gm, mix> * r / K)    dphi = x.T @ (gm * r)

x is read once in each direction. Products accumulate in float32 and, if x and phi have one dtype, multiply in it; parts
of dphi are added in a fixed order.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from liger_ops import backend

_BLOCK_ROWS = 32
_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@backend.launch_cache
def choose_blocks(num_columns: int, element_size: int) -> tuple[int, int]:
    """Columns of mix, and of x, that a program holds: 8 KB of phi, but 16 columns of x at least, as products need."""
    block_columns = max(16, backend.next_power_of_2(num_columns))
    return block_columns, max(16, 8192 // (block_columns * element_size))


@backend.Kernel
def _project_kernel(
    x_ptr,  # [num_rows, length]
    phi_ptr,  # [length, num_columns], contiguous
    mix_ptr,  # [num_rows, num_columns], contiguous
    rstd_ptr,  # [num_rows]
    x_row_stride,
    num_rows,
    length,
    num_columns,
    eps,
    DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program computes BLOCK_ROWS rows."""
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    columns = tl.arange(0, BLOCK_COLUMNS)[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=tl.float32)
    squares = tl.zeros([BLOCK_ROWS, BLOCK_LENGTH], dtype=tl.float32)
    for start in range(0, length, BLOCK_LENGTH):
        inner = start + tl.arange(0, BLOCK_LENGTH)
        x_mask = (rows < num_rows) & (inner[None, :] < length)
        x = tl.load(x_ptr + rows * x_row_stride + inner[None, :], mask=x_mask, other=0.0)
        phi_mask = (inner[:, None] < length) & (columns < num_columns)
        phi = tl.load(phi_ptr + inner[:, None] * num_columns + columns, mask=phi_mask, other=0.0)
        total = tl.dot(x.to(DTYPE), phi.to(DTYPE), total, input_precision="ieee")
        wide = x.to(tl.float32)
        squares += wide * wide
    rstd = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / length + eps)
    mask = (rows < num_rows) & (columns < num_columns)
    tl.store(mix_ptr + rows * num_columns + columns, total * rstd, mask=mask)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)


@backend.Kernel
def _project_backward_kernel(
    x_ptr,  # [num_rows, length]
    phi_ptr,  # [length, num_columns], contiguous
    rstd_ptr,  # [num_rows]
    scale_ptr,  # [num_columns], contiguous
    grad_logits_ptr,  # [num_rows, num_columns], contiguous
    slope_ptr,  # [num_rows], <gm, mix>
    grad_x_ptr,  # [num_rows, length], contiguous, or None
    parts_ptr,  # [num_parts, length, num_columns], of the gradient of phi, or None
    x_row_stride,
    num_rows,
    length,
    num_columns,
    num_parts,
    DTYPE: tl.constexpr,
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
    phi = tl.load(phi_ptr + phi_offsets, mask=phi_mask, other=0.0).to(DTYPE)
    scale = tl.load(scale_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_LENGTH, BLOCK_COLUMNS], dtype=tl.float32)
    for start in range(part * BLOCK_ROWS, num_rows, num_parts * BLOCK_ROWS):
        rows = (tl.cast(start, tl.int64) + tl.arange(0, BLOCK_ROWS))[:, None]
        x_mask = (rows < num_rows) & (inner[None, :] < length)
        x = tl.load(x_ptr + rows * x_row_stride + inner[None, :], mask=x_mask, other=0.0)
        mask = (rows < num_rows) & (columns < num_columns)
        grad = tl.load(grad_logits_ptr + rows * num_columns + columns, mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)
        grad = (grad * scale * rstd).to(DTYPE)
        if grad_x_ptr is not None:
            slope = tl.load(slope_ptr + rows, mask=rows < num_rows, other=0.0) * rstd * rstd / length
            grad_x = tl.dot(grad, tl.trans(phi), input_precision="ieee") - slope * x.to(tl.float32)
            tl.store(grad_x_ptr + rows * length + inner[None, :], grad_x.to(grad_x_ptr.dtype.element_ty), mask=x_mask)
        if parts_ptr is not None:
            total = tl.dot(tl.trans(x.to(DTYPE)), grad, total, input_precision="ieee")
    if parts_ptr is not None:
        tl.store(parts_ptr + tl.cast(part, tl.int64) * length * num_columns + phi_offsets, total, mask=phi_mask)


def _arguments(x: Tensor, phi: Tensor) -> dict[str, Any]:
    """What both kernels take."""
    length, num_columns = phi.shape
    rows, dtype = backend.as_rows(x, length), x.dtype if x.dtype == phi.dtype else torch.float32
    block_columns, block_length = choose_blocks(num_columns, dtype.itemsize)
    return {
        "x_ptr": rows,
        "phi_ptr": phi.contiguous(),
        "x_row_stride": rows.stride(0),
        "num_rows": rows.shape[0],
        "length": length,
        "num_columns": num_columns,
        "DTYPE": _TRITON_DTYPES[dtype],
        "BLOCK_ROWS": _BLOCK_ROWS,
        "BLOCK_LENGTH": block_length,
        "BLOCK_COLUMNS": block_columns,
        "num_warps": 4,
    }


def project(x: Tensor, phi: Tensor, eps: float, mix: Tensor, rstd: Tensor) -> None:
    """Writes mix ``[num_rows, num_columns]`` and r ``[num_rows]``, both float32, of x ``[*, streams, channels]``."""
    num_programs = -(-mix.shape[0] // _BLOCK_ROWS)
    _project_kernel.launch(num_programs, mix_ptr=mix, rstd_ptr=rstd, eps=eps, **_arguments(x, phi))


def project_backward(
    grad_logits: Tensor, x: Tensor, phi: Tensor, scale: Tensor, rstd: Tensor, slope: Tensor,
    grad_x: Tensor | None, grad_phi: Tensor | None,
) -> None:  # fmt: skip
    """Writes the gradients that are not None, for those of ``mix * scale`` and for ``slope = <gm, mix>``."""
    arguments = _arguments(x, phi)
    num_blocks = -(-arguments["length"] // arguments["BLOCK_LENGTH"])
    wanted = -(-2 * backend.hardware(x.device).multiprocessors // num_blocks)
    num_parts = min(wanted, -(-arguments["num_rows"] // _BLOCK_ROWS))
    parts = None if grad_phi is None else x.new_empty((num_parts, *phi.shape), dtype=torch.float32)
    tensors = {"scale_ptr": scale, "rstd_ptr": rstd, "grad_logits_ptr": grad_logits, "slope_ptr": slope}
    outputs = {"grad_x_ptr": grad_x, "parts_ptr": parts}
    _project_backward_kernel.launch(num_blocks * num_parts, num_parts=num_parts, **tensors, **outputs, **arguments)
    if grad_phi is not None and parts is not None:
        grad_phi.copy_(parts.sum(0))
