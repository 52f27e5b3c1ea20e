"""A gated MLP in float8, ``y = down(activation(gate(x)) * up(x))``, as one function of autograd.

Between its matrix products nothing but payloads is written: forward quantizes the gated product h while it computes it,
backward the gradients of gate and up, and h again for the gradient of down's weight, all of them from float32. Products
are those of :mod:`liger_ops.fp8.linear`.

Saved for backward: the weights, x if those of gate or up need gradients, gate and up (``[num_rows, 2 *
intermediate_size]``), and scales.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_choice, check_floating_tensors, wrong_value
from liger_ops.fp8.linear import DTYPES, BeforeOutput, check_linear, input_gradient, weight_gradients
from liger_ops.fp8.products import DEFAULT_OPTIONS, MULTIPLE, Float8Options, scaled_product
from liger_ops.fp8.rows import (
    E4M3,
    is_interpreted,
    num_warps_for,
    quantize_rows,
    quantize_rows_reference,
    row_scale,
    to_e4m3,
)
from liger_ops.fp8.weights import channel_scales, quantize_weights
from liger_ops.gated_linear_unit import ACTIVATIONS, activate

_MAX_BLOCK = 16384
_PROGRAMS_PER_MULTIPROCESSOR = 16
"""A program fills a multiprocessor: with few of them, those that find theirs taken by a collective double the time."""


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr, INTERPRETED: tl.constexpr):
    """:func:`~liger_ops.gated_linear_unit.activate` in half precision, with fewer instructions for silu."""
    if ACTIVATION == "silu" and not INTERPRETED:
        denominator = 1.0 + tl.exp2(gate * -1.4426950408889634)
        sigmoid = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [denominator], dtype=tl.float32, is_pure=True, pack=1
        )
        value = gate * sigmoid
        slope = sigmoid + value * (1.0 - sigmoid)
    else:
        value, slope = activate(gate, ACTIVATION, True)
    return value, slope


@triton.jit
def _prefetch(row_ptr, num_columns, BLOCK_SIZE: tl.constexpr):
    """Has the L2 cache read a row, by the 128 bytes."""
    LINE: tl.constexpr = 1024 // row_ptr.dtype.element_ty.primitive_bitwidth
    offsets = tl.minimum(tl.arange(0, BLOCK_SIZE // LINE) * LINE, num_columns - 1)
    addresses = (row_ptr + offsets).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@backend.Kernel
def _gated_rows_kernel(
    gate_ptr,  # [num_rows, num_columns]
    up_ptr,  # [num_rows, num_columns]
    payload_ptr,  # [num_rows, num_columns]
    scale_ptr,  # [num_rows]
    kept_gate_ptr,  # [num_rows, num_columns], payloads of gate and up, or None
    kept_up_ptr,
    kept_scale_ptr,  # [num_rows]
    row_stride,  # of gate and up, and of their payloads
    num_columns,
    ACTIVATION: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program quantizes a row of activation(gate) * up, and of gate and up themselves where they are kept."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_SIZE)
    mask = columns < num_columns
    gate = tl.load(gate_ptr + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value, _ = _activate(gate, ACTIVATION, INTERPRETED)
    h = value * up
    scale, inverse = row_scale(tl.max(tl.abs(h)))
    tl.store(payload_ptr + row * num_columns + columns, to_e4m3(h * inverse, INTERPRETED), mask=mask)
    tl.store(scale_ptr + row, scale)
    if kept_gate_ptr is not None:
        scale, inverse = row_scale(tl.max(tl.maximum(tl.abs(gate), tl.abs(up))))
        tl.store(kept_gate_ptr + row * row_stride + columns, to_e4m3(gate * inverse, INTERPRETED), mask=mask)
        tl.store(kept_up_ptr + row * row_stride + columns, to_e4m3(up * inverse, INTERPRETED), mask=mask)
        tl.store(kept_scale_ptr + row, scale)


@backend.Kernel
def _gated_rows_backward_kernel(
    grad_ptr,  # [num_rows, num_columns], of the gated product
    gate_ptr,  # [num_rows, num_columns], as they are or payloads
    up_ptr,  # [num_rows, num_columns]
    kept_scale_ptr,  # [num_rows], of these payloads, or None
    gate_scale_ptr,  # [num_columns], of the channels of gate's gradient
    up_scale_ptr,  # [num_columns]
    grad_gate_ptr,  # [num_rows, num_columns], which may lie over gate and up
    grad_up_ptr,  # [num_rows, num_columns]
    product_ptr,  # [num_rows, num_columns]
    grad_scale_ptr,  # [num_rows], of both gradients
    product_scale_ptr,  # [num_rows]
    row_strides,  # of gate and up, of the gradients and of the product
    num_rows,
    num_columns,
    ACTIVATION: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each program quantizes every num_programs-th row of the gradients of gate and up, and of their product.

    A row fills the registers of a multiprocessor, which loads nothing meanwhile: the cache reads the next row ahead.
    """
    row_stride, payload_row_stride, product_row_stride = row_strides
    columns = tl.arange(0, BLOCK_SIZE)
    mask = columns < num_columns
    for index in tl.range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        grad = tl.load(grad_ptr + row * num_columns + columns, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        if BLOCK_SIZE >= 1024 and not INTERPRETED:
            next_row = tl.minimum(row + tl.num_programs(0), num_rows - 1)
            _prefetch(grad_ptr + next_row * num_columns, num_columns, BLOCK_SIZE)
            _prefetch(gate_ptr + next_row * row_stride, num_columns, BLOCK_SIZE)
            _prefetch(up_ptr + next_row * row_stride, num_columns, BLOCK_SIZE)
        if kept_scale_ptr is not None:
            kept_scale = tl.load(kept_scale_ptr + row)
            gate *= kept_scale
            up *= kept_scale
        value, slope = _activate(gate, ACTIVATION, INTERPRETED)
        h = value * up
        grad_gate = grad * slope * up
        if ACTIVATION == "relu_squared":
            grad_gate = tl.where(gate <= 0.0, 0.0, grad_gate)  # even of infinities
        grad_gate *= tl.load(gate_scale_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        grad_up = grad * value * tl.load(up_scale_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        grad_scale, grad_inverse = row_scale(tl.max(tl.maximum(tl.abs(grad_gate), tl.abs(grad_up))))
        scale, inverse = row_scale(tl.max(tl.abs(h)))
        tl.store(grad_scale_ptr + row, grad_scale)
        tl.store(product_scale_ptr + row, scale)
        grad_offsets = row * payload_row_stride + columns
        tl.store(grad_gate_ptr + grad_offsets, to_e4m3(grad_gate * grad_inverse, INTERPRETED), mask=mask)
        tl.store(grad_up_ptr + grad_offsets, to_e4m3(grad_up * grad_inverse, INTERPRETED), mask=mask)
        tl.store(product_ptr + row * product_row_stride + columns, to_e4m3(h * inverse, INTERPRETED), mask=mask)


def _halves(packed: Tensor, up_first: bool) -> tuple[Tensor, Tensor]:
    first, second = packed.chunk(2, dim=-1)
    return (second, first) if up_first else (first, second)


@backend.register_op("fp8_gated_rows_", fake=lambda *args: None, mutates=["payload", "scale", "kept", "kept_scale"])
def _gated_rows(
    gate_up: Tensor,
    activation: str,
    up_first: bool,
    payload: Tensor,
    scale: Tensor,
    kept: Tensor | None,
    kept_scale: Tensor | None,
) -> None:
    gate, up = _halves(gate_up, up_first)
    kept_gate, kept_up = (None, None) if kept is None else _halves(kept, up_first)
    block_size = backend.next_power_of_2(gate.shape[1])
    _gated_rows_kernel.launch(
        gate.shape[0],
        gate_ptr=gate,
        up_ptr=up,
        payload_ptr=payload,
        scale_ptr=scale,
        kept_gate_ptr=kept_gate,
        kept_up_ptr=kept_up,
        kept_scale_ptr=kept_scale,
        row_stride=gate.stride(0),
        num_columns=gate.shape[1],
        ACTIVATION=activation,
        BLOCK_SIZE=block_size,
        INTERPRETED=is_interpreted(gate),
        num_warps=num_warps_for(block_size),
    )


@backend.register_op(
    "fp8_gated_rows_backward_",
    fake=lambda *args: None,
    mutates=["grad_payload", "product", "grad_scale", "product_scale"],
)
def _gated_rows_backward(
    grad: Tensor,
    gate_up: Tensor,
    kept_scale: Tensor | None,
    channel_scale: Tensor,
    activation: str,
    up_first: bool,
    grad_payload: Tensor,
    product: Tensor,
    grad_scale: Tensor,
    product_scale: Tensor,
) -> None:
    gate, up = _halves(gate_up, up_first)
    gate_scale, up_scale = _halves(channel_scale, up_first)
    grad_gate, grad_up = _halves(grad_payload, up_first)
    num_rows, num_columns = gate.shape
    block_size = backend.next_power_of_2(num_columns)
    _gated_rows_backward_kernel.launch(
        min(num_rows, _PROGRAMS_PER_MULTIPROCESSOR * backend.hardware(gate.device).multiprocessors),
        grad_ptr=grad,
        gate_ptr=gate,
        up_ptr=up,
        kept_scale_ptr=kept_scale,
        gate_scale_ptr=gate_scale,
        up_scale_ptr=up_scale,
        grad_gate_ptr=grad_gate,
        grad_up_ptr=grad_up,
        product_ptr=product,
        grad_scale_ptr=grad_scale,
        product_scale_ptr=product_scale,
        row_strides=(gate.stride(0), grad_payload.stride(0), product.stride(0)),
        num_rows=num_rows,
        num_columns=num_columns,
        ACTIVATION=activation,
        BLOCK_SIZE=block_size,
        INTERPRETED=is_interpreted(gate),
        num_warps=num_warps_for(block_size),
    )


def gated_rows(gate_up: Tensor, activation: str, up_first: bool, *, keep: bool = False) -> tuple[Tensor, ...]:
    """The payload ``[num_rows, intermediate_size]`` of ``activation(gate) * up`` and its scales.

    ``gate_up`` is ``[num_rows, 2 * intermediate_size]``, the gate first unless ``up_first``. With ``keep`` also returns
    the payload of gate_up and its scales, of which backward can make the rest.
    """
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    if not backend.runs_on_triton(gate_up) or num_columns > _MAX_BLOCK or num_rows == 0:
        gate, up = (each.float() for each in _halves(gate_up, up_first))
        payload, scale = quantize_rows(ACTIVATIONS[activation](gate) * up)
        return payload, scale, *(quantize_rows(gate_up) if keep else ())
    payload = gate_up.new_empty((num_rows, num_columns), dtype=E4M3)
    scale = gate_up.new_empty(num_rows, dtype=torch.float32)
    kept = (torch.empty_like(gate_up, dtype=E4M3), torch.empty_like(scale)) if keep else ()
    _gated_rows(gate_up, activation, up_first, payload, scale, *(kept or (None, None)))
    return payload, scale, *kept


def gated_rows_backward(
    grad: Tensor,
    gate_up: Tensor,
    kept_scale: Tensor | None,
    channel_scale: Tensor,
    activation: str,
    up_first: bool,
    *,
    overwrite: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Payloads and scales of gate's and up's gradients, times the scales of their channels, and of the gated product.

    Args:
        grad: ``[num_rows, intermediate_size]``, of the gated product, contiguous.
        gate_up, kept_scale: As in :func:`gated_rows`, and None, or the payload and the scales that it kept.
        channel_scale: ``[2 * intermediate_size]``, powers of two in bfloat16.
        activation, up_first: As there.
        overwrite: Whether the payloads may be written over ``gate_up``.

    Returns:
        The gradients' payload ``[num_rows, 2 * intermediate_size]`` in the order of ``gate_up``, its scales, the
        product's payload and its scales.
    """
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    if not backend.runs_on_triton(grad) or num_columns > _MAX_BLOCK or num_rows == 0:
        gate, up = _halves(gate_up.float() if kept_scale is None else gate_up.float() * kept_scale[:, None], up_first)
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            value = ACTIVATIONS[activation](leaf)
        (slope,) = torch.autograd.grad(value, leaf, grad.float() * up)
        parts = [slope, grad.float() * value.detach()]
        gradients = torch.cat(parts[::-1] if up_first else parts, dim=1)
        return *quantize_rows_reference(gradients, channel_scale), *quantize_rows_reference(value.detach() * up)
    scales = grad.new_empty((2, num_rows), dtype=torch.float32)
    memory = gate_up.detach().view(E4M3) if overwrite else grad.new_empty((num_rows, 2 * num_columns), dtype=E4M3)
    payload, product = memory[:, : 2 * num_columns], memory[:, 2 * num_columns : 3 * num_columns]
    if product.shape[1] < num_columns:  # there is no room for it
        product = grad.new_empty((num_rows, num_columns), dtype=E4M3)
    _gated_rows_backward(
        grad, gate_up, kept_scale, channel_scale, activation, up_first, payload, product, *scales.unbind()
    )
    return payload, scales[0], product, scales[1]


class GatedMLPFunction(torch.autograd.Function):
    """``[..., hidden_size]`` to ``[..., hidden_size]``; the weights of gate and up, or of both in one, then down's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
        activation, up_first, options, before, down, *gate_up_weights = args
        dtype = backend.autocast_dtype(x.device.type) or x.dtype
        x_payload, x_scale = quantize_rows(backend.as_rows(x, x.shape[-1]))
        (gate_up_payload,), scale = quantize_weights(gate_up_weights, together=True)
        gate_up_scale = channel_scales(scale)
        how = options.of_product(0, x.shape[-1])
        gate_up = scaled_product(x_payload, gate_up_payload, x_scale, scale, dtype=dtype, **how)
        del x_payload, gate_up_payload
        (payload,), scale = quantize_weights([down])
        down_scale = channel_scales(scale)
        saved = [*gate_up_weights, down, gate_up_scale, down_scale]
        if any(ctx.needs_input_grad[6:]):
            saved += [x, x_scale]
        ctx.num_others = len(saved)
        if options.save_payloads:
            h, h_scale, *kept = gated_rows(gate_up, activation, up_first, keep=True)
            saved += kept
            del gate_up, kept
        else:
            saved.append(gate_up)
        if before is not None:
            before(saved)
        if not options.save_payloads:
            h, h_scale = gated_rows(gate_up, activation, up_first)
        ctx.save_for_backward(*saved)
        ctx.num_weights = len(gate_up_weights)
        ctx.settings, ctx.x_shape, ctx.x_dtype = (activation, up_first, options), x.shape, x.dtype
        y = scaled_product(h, payload, h_scale, scale, dtype=dtype, **options.of_product(0, down.shape[1]))
        return backend.reshaped(y, x.shape[:-1])

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        activation, up_first, options = ctx.settings
        count, num_others = ctx.num_weights, ctx.num_others
        needs_x, needs_down, *needs_gate_up = [ctx.needs_input_grad[index] for index in (0, *range(5, 6 + count))]
        saved, overwrite = backend.take_saved_tensors(ctx, own=num_others)
        weights, inputs = saved[:count], saved[count + 3 : num_others]
        down, gate_up_scale, down_scale = saved[count : count + 3]
        kept, kept_scale = (*saved[num_others:], None)[:2]
        del saved
        grad = backend.as_rows(grad, grad.shape[-1])
        quantized = list(quantize_rows(grad, down_scale))
        grad_product = input_gradient([down], down_scale, quantized, grad.dtype, options)
        payload, scale, *product = gated_rows_backward(
            grad_product, kept, kept_scale, gate_up_scale, activation, up_first, overwrite=overwrite
        )
        del kept, grad_product
        (grad_down,) = weight_gradients([down], [needs_down], product, [grad], quantized, down_scale, options)
        del product
        quantized = [payload, scale]
        del payload
        grad_x = None
        if needs_x:
            grad_x = input_gradient(weights, gate_up_scale, quantized, grad.dtype, options)
            grad_x = grad_x.to(ctx.x_dtype).view(ctx.x_shape)
        inputs = [*(backend.as_rows(x, x.shape[-1]) for x in inputs[:1]), *inputs[1:]]
        grads = weight_gradients(weights, needs_gate_up, inputs, [], quantized, gate_up_scale, options)
        return grad_x, None, None, None, None, grad_down, *grads


def scaled_gated_mlp(
    x: Tensor,
    gate_up: Sequence[Tensor],
    down: Tensor,
    activation: str = "silu",
    *,
    up_first: bool = False,
    options: Float8Options = DEFAULT_OPTIONS,
    before_output: BeforeOutput | None = None,
) -> Tensor:
    """``(activation(x gate^T) * (x up^T)) down^T`` in float8.

    Args:
        x: ``[..., hidden_size]``, of float32 or bfloat16.
        gate_up: The weights of gate and up, ``[intermediate_size, hidden_size]`` each, or one that has both.
        down: ``[hidden_size, intermediate_size]``.
        activation: "silu", "gelu", "gelu_tanh" or "relu_squared".
        up_first: Whether up comes before gate in ``gate_up``.
        options, before_output: As in :func:`~liger_ops.fp8.linear.scaled_linear`.

    Returns:
        ``[..., hidden_size]``, in autocast's dtype or x's.

    Raises:
        TypeError, ValueError: As :func:`~liger_ops.fp8.linear.scaled_linear`, and a ValueError for an unknown
            activation, or for ``high_precision_wgrad``, for which the parts are separate functions.
    """
    check_choice("activation", activation, ACTIVATIONS)
    if options.high_precision_wgrad:
        raise wrong_value("options", "without high_precision_wgrad", options)
    check_floating_tensors("x", x, down=down, optional=False)
    for weight in gate_up:
        check_floating_tensors("x", x, gate_up=weight, optional=False)
        check_linear(x, weight)
    if len({weight.shape[0] for weight in gate_up}) != 1 or len(gate_up) > 2:
        raise wrong_value("gate_up", "one weight, or two of one shape", [tuple(weight.shape) for weight in gate_up])
    if down.dtype not in DTYPES:
        raise wrong_value("down", "of float32 or bfloat16, for float8 products", down)
    width = sum(weight.shape[0] for weight in gate_up)
    if down.dim() != 2 or 2 * down.shape[1] != width or down.numel() == 0 or any(n % MULTIPLE for n in down.shape):
        raise wrong_value("down", f"[hidden_size, {width // 2}], both multiples of {MULTIPLE},", down)
    result: Tensor = GatedMLPFunction.apply(x, activation, up_first, options, before_output, down, *gate_up)
    return result
