"""Gated linear units: y = activation(gate) * up, as in the feed-forward layers of language models.

    silu(g) = g * sigmoid(g)                                            SwiGLU
    gelu(g) = g * (1 + erf(g / sqrt(2))) / 2                            GeGLU, and its approximation by tanh,
    gelu(g) = g * sigmoid(2 * sqrt(2 / pi) * (g + 0.044715 * g**3))     written with a sigmoid
    relu_squared(g) = max(g, 0)**2

Falcon-H1 has silu(multiplier * g) with a constant. Computed in float32 for every half-precision input and rounded once.
Saved: the inputs, which a linear layer's backward keeps alive anyway; the activation is computed again instead of being
stored. Sources: arXiv:2002.05202, arXiv:1606.08415, arXiv:2109.08668, arXiv:2507.22448.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import (
    check_choice,
    check_floating,
    check_floating_tensors,
    check_number,
    check_shape,
    wrong_value,
)
from liger_ops.recipes import made

APPROXIMATIONS = ("none", "tanh")
"""Of gelu, as ``F.gelu`` names them."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu_squared": lambda gate: F.relu(gate).square(),
}
"""The reference of each activation; ``activate`` has the same for the kernels."""


def gated_unit_reference(gate: Tensor, up: Tensor | None, activation: str, packed: bool, multiplier: float) -> Tensor:
    """``activation(multiplier * gate) * up`` in plain PyTorch, in float32 or wider, rounded once.

    Without ``up`` if there is none and gate is not packed.
    """
    if packed:
        gate, up = gate.chunk(2, dim=-1)
    output_dtype = gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype)
    compute_dtype = torch.promote_types(output_dtype, torch.float32)
    gate = gate.to(compute_dtype)
    y = ACTIVATIONS[activation](gate if multiplier == 1.0 else gate * multiplier)
    return (y if up is None else y * up.to(compute_dtype)).to(output_dtype)


_MAX_BLOCK_SIZE = 1024


def choose_launch(num_columns: int) -> tuple[int, int]:
    """The columns of one row that a program takes, and its warps; eight elements per thread, 16 bytes in bfloat16."""
    block_size = min(backend.next_power_of_2(num_columns), _MAX_BLOCK_SIZE)
    return block_size, max(1, block_size // 256)


@triton.jit
def _normal_tail(x):
    """Tail probability of the normal distribution at ``x >= 0``, (1 - erf(x / sqrt(2))) / 2, within 8e-6 of its value.

    With t = 1 / (1 + 0.48 x / sqrt(2)) it is t * 2**(p(t) - x**2 log2(e) / 2), a form of Numerical Recipes (section
    6.2); p has the least largest error for 0 <= x <= 12. Half as many instructions as the library's erf.
    """
    t = 1.0 / (1.0 + 0.33941125497 * x)
    exponent = 0.3282320999253934
    exponent = exponent * t - 1.0925707126505038
    exponent = exponent * t + 0.8593409008328262
    exponent = exponent * t + 0.30747302909505797
    exponent = exponent * t + 1.4849551078238996
    exponent = exponent * t - 2.887441250320364
    return t * tl.exp2(exponent - 0.7213475204444817 * (x * x))


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr, HALF: tl.constexpr):
    """The activation of ``gate`` and its derivative, in float32; with HALF, to the accuracy of half precision only."""
    if ACTIVATION == "silu":
        sigmoid = tl.sigmoid(gate)
        value = gate * sigmoid
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    elif ACTIVATION == "gelu":
        if HALF:
            tail = _normal_tail(tl.abs(gate))
            probability = tl.where(gate < 0.0, tail, 1.0 - tail)
        else:
            probability = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        value = gate * probability
        slope = probability + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is sigmoid(2 u), which does not cancel; the factors turn exp(-2 u) into a power of two.
        square = gate * gate
        decay = tl.exp2(gate * (-2.302208198432183 - 0.10294324221261642 * square))
        sigmoid = 1.0 / (1.0 + decay)
        value = gate * sigmoid
        complement = tl.where(decay < float("inf"), decay * sigmoid, 1.0)
        slope = sigmoid + value * complement * (1.5957691216057308 + 0.2140644384779411 * square)
    else:
        tl.static_assert(ACTIVATION == "relu_squared", "unknown activation")
        positive = tl.where(gate < 0.0, 0.0, gate)  # NaN stays NaN
        value = positive * positive
        slope = 2.0 * positive
    return value, slope


@backend.Kernel
def _gated_unit_forward_kernel(
    gate_ptr,  # [num_rows, num_columns]
    up_ptr,  # [num_rows, num_columns] or None
    y_ptr,  # [num_rows, num_columns], contiguous
    row_strides,  # of gate and up
    num_columns,
    multiplier,
    ACTIVATION: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program computes BLOCK_SIZE columns of one row of y."""
    gate_row_stride, up_row_stride = row_strides
    blocks_per_row = (num_columns - 1) // BLOCK_SIZE + 1  # cdiv would overflow just below 2**31 columns
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    columns = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = columns < num_columns
    gate = tl.load(gate_ptr + row * gate_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gate *= tl.cast(multiplier, tl.float32)
    y, _ = activate(gate, ACTIVATION, gate_ptr.dtype.element_ty != tl.float32)
    if up_ptr is not None:
        y *= tl.load(up_ptr + row * up_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * num_columns + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@backend.Kernel
def _gated_unit_backward_kernel(
    grad_y_ptr,  # [num_rows, num_columns]
    gate_ptr,  # [num_rows, num_columns]
    up_ptr,  # [num_rows, num_columns] or None
    grad_gate_ptr,  # [num_rows, num_columns] or None
    grad_up_ptr,  # [num_rows, num_columns] or None
    row_strides,  # of grad_y, gate and up
    grad_row_stride,  # of grad_gate and of grad_up
    num_columns,
    multiplier,
    ACTIVATION: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program computes BLOCK_SIZE columns of one row of the gradients."""
    grad_y_row_stride, gate_row_stride, up_row_stride = row_strides
    blocks_per_row = (num_columns - 1) // BLOCK_SIZE + 1  # cdiv would overflow just below 2**31 columns
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    columns = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = columns < num_columns
    grad_y = tl.load(grad_y_ptr + row * grad_y_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gate *= tl.cast(multiplier, tl.float32)
    value, slope = activate(gate, ACTIVATION, gate_ptr.dtype.element_ty != tl.float32)
    grad_offsets = row * grad_row_stride + columns
    if grad_gate_ptr is not None:
        grad_gate = grad_y * slope * tl.cast(multiplier, tl.float32)
        if up_ptr is not None:
            grad_gate *= tl.load(up_ptr + row * up_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        if ACTIVATION == "relu_squared":
            grad_gate = tl.where(gate <= 0.0, 0.0, grad_gate)  # even of infinities
        tl.store(grad_gate_ptr + grad_offsets, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=mask)
    if grad_up_ptr is not None:
        grad_up = grad_y * value
        tl.store(grad_up_ptr + grad_offsets, grad_up.to(grad_up_ptr.dtype.element_ty), mask=mask)


def _as_rows(*tensors: Tensor | None) -> tuple[list[Tensor | None], tuple[int, ...], int, int]:
    """Tensors of one shape as rows, copied only where they must be: tensors, row strides, rows and columns."""
    given = [tensor for tensor in tensors if tensor is not None]
    if all(tensor.is_contiguous() for tensor in given):
        return list(tensors), (0,) * len(tensors), 1, given[0].numel()  # one long row leaves no remainders
    num_columns = given[0].shape[-1]
    rows = [None if tensor is None else backend.as_rows(tensor, num_columns) for tensor in tensors]
    strides = tuple([0 if row is None else row.stride(0) for row in rows])
    return rows, strides, given[0].numel() // num_columns, num_columns


def _halves(packed: Tensor) -> tuple[Tensor, Tensor]:
    half = packed.shape[-1] // 2
    return packed.narrow(-1, 0, half), packed.narrow(-1, half, half)


def _forward_fake(gate: Tensor, up: Tensor | None, activation: str, packed: bool, multiplier: float) -> Tensor:
    if packed:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    dtype = gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype)
    return torch.empty_like(gate, dtype=dtype, memory_format=torch.contiguous_format)


@backend.register_op("gated_unit_forward", fake=_forward_fake)
def _gated_unit_forward(gate: Tensor, up: Tensor | None, activation: str, packed: bool, multiplier: float) -> Tensor:
    y = _forward_fake(gate, up, activation, packed, multiplier)
    if y.numel() == 0:
        return y
    if packed:
        gate, up = _halves(gate)
    (gate_rows, up_rows), strides, num_rows, num_columns = _as_rows(gate, up)
    block_size, num_warps = choose_launch(num_columns)
    _gated_unit_forward_kernel.launch(
        num_rows * -(-num_columns // block_size),
        gate_ptr=gate_rows,
        up_ptr=up_rows,
        y_ptr=y,
        row_strides=strides,
        num_columns=num_columns,
        multiplier=multiplier,
        ACTIVATION=activation,
        BLOCK_SIZE=block_size,
        num_warps=num_warps,
    )
    return y


def _backward_fake(grad_y: Tensor, gate: Tensor, up: Tensor | None, *others: Any) -> list[Tensor]:
    *_, overwrite, needs = others
    return [] if overwrite else backend.empty_gradients((gate, up), needs)


def _gradients(
    grad_y: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    packed: bool,
    multiplier: float,
    overwrite: bool,
    needs: list[bool],
) -> list[Tensor]:
    """Returns those gradients of gate (the packed tensor, if it is one) and up that are needed, contiguous.

    With ``overwrite``, as the op that ends in an underscore has it, they are written over gate and up instead.
    """
    gradients = _backward_fake(grad_y, gate, up, overwrite, needs)
    if grad_y.numel() == 0:
        return gradients
    grad_gate, grad_up = (gate, up) if overwrite else backend.spread(gradients, needs)
    if packed and grad_gate is not None:
        gate, up = _halves(gate)
        grad_gate, grad_up = _halves(grad_gate)
    (grad_y_rows, gate_rows, up_rows), strides, num_rows, num_columns = _as_rows(grad_y, gate, up)
    block_size, num_warps = choose_launch(num_columns)
    _gated_unit_backward_kernel.launch(
        num_rows * -(-num_columns // block_size),
        grad_y_ptr=grad_y_rows,
        gate_ptr=gate_rows,
        up_ptr=up_rows,
        grad_gate_ptr=grad_gate,
        grad_up_ptr=grad_up,
        row_strides=strides,
        grad_row_stride=num_columns * (2 if packed else 1),
        num_columns=num_columns,
        multiplier=multiplier,
        ACTIVATION=activation,
        BLOCK_SIZE=block_size,
        num_warps=num_warps,
    )
    return gradients


_gated_unit_backward = backend.register_op("gated_unit_backward", _backward_fake)(_gradients)
_gated_unit_backward_in_place = backend.register_op("gated_unit_backward_", _backward_fake, mutates=["gate", "up"])(
    _gradients
)


class GatedUnitFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: str, packed: bool, multiplier: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.settings = activation, packed, multiplier
        return _gated_unit_forward(gate, up, *ctx.settings)

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        needs = list(ctx.needs_input_grad[:2])
        (gate, up), is_free = backend.take_saved_tensors(ctx)
        if is_free and needs == [True, up is not None]:
            _gated_unit_backward_in_place(grad_y, gate, up, *ctx.settings, True, needs)
            return gate.detach(), None if up is None else up.detach(), None, None, None
        gradients = _gated_unit_backward(grad_y, gate, up, *ctx.settings, False, needs)
        return *backend.spread(gradients, needs), None, None, None


def _gated_unit(gate: Tensor, up: Tensor | None, activation: str, multiplier: float = 1.0) -> Tensor:
    check_floating_tensors("gate", gate, up=up)
    if up is not None:
        if up.shape != gate.shape:
            check_shape("up", up, gate.shape, "gate's")
    elif gate.dim() == 0 or gate.shape[-1] % 2:
        raise wrong_value("gate", "packed, with an even number of columns, without up", gate)
    return _compute(gate, up, activation, up is None, multiplier)


def _compute(*args: Any) -> Tensor:
    gate, up, *_ = args
    if not backend.runs_on_triton(gate, up):
        return gated_unit_reference(*args)
    if backend.needs_graph(gate, up):
        return made(GatedUnitFunction.apply(*args), _compute, *args)
    return _gated_unit_forward(*args)


def silu_mul(gate: Tensor, up: Tensor | None = None, *, gate_multiplier: float = 1.0) -> Tensor:
    """Returns ``silu(gate_multiplier * gate) * up`` in one pass over both tensors: the inside of a SwiGLU layer.

    Args:
        gate: The tensor that goes through the activation, of any shape, typically ``[batch_size, seq_len,
            intermediate_size]``. Rows may lie apart in memory; they are read in place. Without ``up``, both in one
            tensor ``[..., 2 * intermediate_size]``, as Phi-3 and GLM-4 project them: the gate in the first half of
            the columns, ``up`` in the second. Its gradient is then one such tensor too.
        up: The tensor it gates, of the same shape.
        gate_multiplier: Constant factor of ``gate`` inside the activation, as in Falcon-H1.

    Returns:
        A contiguous tensor ``[..., intermediate_size]`` in the promoted dtype of both.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point, or ``gate_multiplier`` is no number.
        ValueError: If shapes or devices differ, ``gate_multiplier`` is not finite, or a packed tensor has an odd number
            of columns.
    """
    if type(gate_multiplier) is not float or not math.isfinite(gate_multiplier):
        check_number("gate_multiplier", gate_multiplier)
    return _gated_unit(gate, up, "silu", float(gate_multiplier))


def gelu_mul(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """Returns ``gelu(gate) * up`` in one pass over both tensors: the inside of a GeGLU layer.

    Args:
        gate: As in :func:`silu_mul`, packed without ``up``.
        up: The tensor it gates, of the same shape.
        approximate: "none" for the error function, "tanh" for Gemma's approximation, as in ``F.gelu``.

    Returns and raises as :func:`silu_mul`, and a ValueError if ``approximate`` is unknown.
    """
    check_choice("approximate", approximate, APPROXIMATIONS)
    return _gated_unit(gate, up, "gelu" if approximate == "none" else "gelu_tanh")


def relu_squared_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Returns ``relu(gate)**2 * up`` in one pass over both tensors; see :func:`silu_mul`."""
    return _gated_unit(gate, up, "relu_squared")


def relu_squared(input: Tensor) -> Tensor:
    """Returns ``relu(input)**2``, the ungated activation of Primer and Nemotron, as a contiguous tensor."""
    check_floating("input", input)
    return _compute(input, None, "relu_squared", False, 1.0)
