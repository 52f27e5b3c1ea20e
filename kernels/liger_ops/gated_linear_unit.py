"""Gated linear unit: y = silu(gate) * up, silu(g) = g * sigmoid(g), as in SwiGLU feed-forward layers.

Computed in float32 for every half-precision input and rounded once. Saved: gate and up, which a linear layer's backward
keeps alive anyway; the sigmoid is computed again instead of being stored.
Source: arXiv:2002.05202.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_ops import backend


def silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in plain PyTorch, in float32 or wider, rounded once."""
    output_dtype = torch.promote_types(gate.dtype, up.dtype)
    compute_dtype = torch.promote_types(output_dtype, torch.float32)
    return (F.silu(gate.to(compute_dtype)) * up.to(compute_dtype)).to(output_dtype)


@dataclass(frozen=True)
class SiluMulLaunch:
    """How rows are cut: each program takes ``block_size`` neighbouring columns of one row."""

    block_size: int
    num_warps: int


def choose_launch(num_columns: int) -> SiluMulLaunch:
    """Blocks of 1024 columns, smaller for shorter rows; eight elements a thread, one 16-byte load in bfloat16."""
    block_size = min(1024, triton.next_power_of_2(num_columns))
    return SiluMulLaunch(block_size=block_size, num_warps=max(1, block_size // 256))


@triton.jit
def _silu_mul_forward_kernel(
    gate_ptr,  # [num_rows, num_columns]
    up_ptr,  # [num_rows, num_columns]
    y_ptr,  # [num_rows, num_columns], contiguous
    gate_row_stride,
    up_row_stride,
    num_columns,
    BLOCK_SIZE: tl.constexpr,
):
    """One program computes BLOCK_SIZE columns of one row of y."""
    blocks_per_row = tl.cdiv(num_columns, BLOCK_SIZE)
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    columns = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = columns < num_columns
    gate = tl.load(gate_ptr + row * gate_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * num_columns + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _silu_mul_backward_kernel(
    grad_output_ptr,  # [num_rows, num_columns]
    gate_ptr,  # [num_rows, num_columns]
    up_ptr,  # [num_rows, num_columns]
    grad_gate_ptr,  # [num_rows, num_columns], contiguous, written if GRAD_GATE
    grad_up_ptr,  # [num_rows, num_columns], contiguous, written if GRAD_UP
    grad_output_row_stride,
    gate_row_stride,
    up_row_stride,
    num_columns,
    GRAD_GATE: tl.constexpr,
    GRAD_UP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program computes BLOCK_SIZE columns of one row of the gradients."""
    blocks_per_row = tl.cdiv(num_columns, BLOCK_SIZE)
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    columns = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = columns < num_columns
    grad_output = tl.load(grad_output_ptr + row * grad_output_row_stride + columns, mask=mask, other=0.0)
    grad_output = grad_output.to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    output_offsets = row * num_columns + columns
    if GRAD_GATE:
        up = tl.load(up_ptr + row * up_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        grad_gate = grad_output * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(grad_gate_ptr + output_offsets, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=mask)
    if GRAD_UP:
        grad_up = grad_output * gate * sigmoid
        tl.store(grad_up_ptr + output_offsets, grad_up.to(grad_up_ptr.dtype.element_ty), mask=mask)


def _as_rows(*tensors: Tensor) -> list[Tensor]:
    """Views equally shaped tensors as [num_rows, num_columns] with unit column stride, copying only where it must."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(1, -1) for tensor in tensors]  # one long row leaves no remainder at each row's end
    rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    return [row if row.stride(1) == 1 else row.contiguous() for row in rows]


def _silu_mul_forward_fake(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


@backend.register_op("silu_mul_forward(Tensor gate, Tensor up) -> Tensor", fake=_silu_mul_forward_fake)
def _silu_mul_forward(gate: Tensor, up: Tensor) -> Tensor:
    y = _silu_mul_forward_fake(gate, up)
    if y.numel() == 0:
        return y
    gate_rows, up_rows = _as_rows(gate, up)
    num_rows, num_columns = gate_rows.shape
    launch = choose_launch(num_columns)
    _silu_mul_forward_kernel[(num_rows * triton.cdiv(num_columns, launch.block_size),)](
        gate_ptr=gate_rows,
        up_ptr=up_rows,
        y_ptr=y,
        gate_row_stride=gate_rows.stride(0),
        up_row_stride=up_rows.stride(0),
        num_columns=num_columns,
        BLOCK_SIZE=launch.block_size,
        num_warps=launch.num_warps,
    )
    return y


def _silu_mul_backward_fake(
    grad_output: Tensor, gate: Tensor, up: Tensor, needs_grad_gate: bool, needs_grad_up: bool
) -> tuple[Tensor, Tensor]:
    grad_gate = gate.new_empty(gate.shape if needs_grad_gate else 0)
    grad_up = up.new_empty(up.shape if needs_grad_up else 0)
    return grad_gate, grad_up


@backend.register_op(
    "silu_mul_backward(Tensor grad_output, Tensor gate, Tensor up, bool needs_grad_gate, bool needs_grad_up)"
    " -> (Tensor, Tensor)",
    fake=_silu_mul_backward_fake,
)
def _silu_mul_backward(
    grad_output: Tensor, gate: Tensor, up: Tensor, needs_grad_gate: bool, needs_grad_up: bool
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up; one that is not needed comes back empty."""
    grad_gate, grad_up = _silu_mul_backward_fake(grad_output, gate, up, needs_grad_gate, needs_grad_up)
    if gate.numel() == 0:
        return grad_gate, grad_up
    grad_output_rows, gate_rows, up_rows = _as_rows(grad_output, gate, up)
    num_rows, num_columns = gate_rows.shape
    launch = choose_launch(num_columns)
    _silu_mul_backward_kernel[(num_rows * triton.cdiv(num_columns, launch.block_size),)](
        grad_output_ptr=grad_output_rows,
        gate_ptr=gate_rows,
        up_ptr=up_rows,
        grad_gate_ptr=grad_gate,
        grad_up_ptr=grad_up,
        grad_output_row_stride=grad_output_rows.stride(0),
        gate_row_stride=gate_rows.stride(0),
        up_row_stride=up_rows.stride(0),
        num_columns=num_columns,
        GRAD_GATE=needs_grad_gate,
        GRAD_UP=needs_grad_up,
        BLOCK_SIZE=launch.block_size,
        num_warps=launch.num_warps,
    )
    return grad_gate, grad_up


class SiluMulFunction(torch.autograd.Function):
    """Ties the two ops together for autograd."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _silu_mul_forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        needs_grad_gate, needs_grad_up = ctx.needs_input_grad
        grad_gate, grad_up = _silu_mul_backward(grad_output, *ctx.saved_tensors, needs_grad_gate, needs_grad_up)
        return grad_gate if needs_grad_gate else None, grad_up if needs_grad_up else None


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Returns ``silu(gate) * up`` in one pass over both tensors.

    Args:
        gate: The tensor that goes through silu, of any shape, typically ``[batch_size, seq_len, intermediate_size]``.
            Rows may lie apart in memory, as the two halves of a packed projection do; they are read in place.
        up: The tensor it gates, of the same shape.

    Returns:
        A contiguous tensor of that shape in the promoted dtype of both.

    Raises:
        ValueError: If the shapes differ.
    """
    if gate.shape != up.shape:
        raise ValueError(f"up must have gate's shape {tuple(gate.shape)}, got {tuple(up.shape)}")
    if not backend.use_triton(gate) or torch.float64 in (gate.dtype, up.dtype):
        return silu_mul_reference(gate, up)
    return SiluMulFunction.apply(gate, up)
