"""Linear layers in float8: ``y = x W^T + bias`` and its gradients, of one layer or of several that share their input.

x, W and the gradient g of y have a scale per row each (arXiv:2209.05433 for the format; a scale per token and output
channel as in torchao's "rowwise"), and one payload each, from which both of its products are made:

    y = (x_q W_q^T) * x_scale[m] * w_scale[n]
    dx = (g_q W_q) * g_scale[m]                     where g_q is the payload of g * w_scale[n], which is exact
    dW = (g_q'^T x_q') * 2**C / w_scale[n]          with rows brought to one scale, see liger_ops.fp8.transpose

In the last two w_scale is that of liger_ops.fp8.weights.channel_scales, which differs for rows of W far below others.

Saved for backward: x and the weights as they are, and the scales. Payloads are recomputed, with the same values.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import check_floating_tensors, check_shape, wrong_value
from liger_ops.fp8.products import DEFAULT_OPTIONS, MULTIPLE, Float8Options, scaled_product
from liger_ops.fp8.rows import E4M3, quantize_rows
from liger_ops.fp8.transpose import align, transpose
from liger_ops.fp8.weights import channel_scales, quantize_weights, transpose_weights

BeforeOutput = Callable[[Sequence[Tensor]], None]
DTYPES = (torch.float32, torch.bfloat16)
"""Of what is multiplied in float8."""


def input_gradient(
    weights: Sequence[Tensor],
    w_scale: Tensor,
    quantized: Sequence[Tensor],
    dtype: torch.dtype,
    options: Float8Options,
) -> Tensor:
    """The gradient ``[M, K]`` of the input of all weights, of g's payload, which ``w_scale`` multiplied, and scales."""
    (g_payload, g_scale), w_payload = quantized, transpose_weights(weights, w_scale)
    return scaled_product(g_payload, w_payload, g_scale, None, dtype=dtype, **options.of_product(1))


def weight_gradients(
    weights: Sequence[Tensor],
    needs: Sequence[bool],
    inputs: Sequence[Tensor],
    g: Sequence[Tensor],
    quantized: list[Tensor],
    w_scale: Tensor,
    options: Float8Options,
) -> list[Tensor | None]:
    """The gradients of weights that share their input, None where none is needed.

    ``inputs`` are x, or its payload, as rows, and its scales, if any is needed. g comes in parts and ``quantized``: its
    payload, which ``w_scale`` multiplied, and scales. That list is emptied, for its memory to be free in the product.
    """
    if not any(needs):
        return [None] * len(needs)
    (x, x_scale), dtype = inputs, weights[0].dtype
    sizes = [weight.shape[0] for weight in weights]
    if options.high_precision_wgrad:
        gradient = torch.mm((g[0] if len(g) == 1 else torch.cat(list(g), dim=1)).t(), x.to(g[0].dtype)).to(dtype)
    elif x.shape[0] == 0:
        gradient = x.new_zeros((sum(sizes), x.shape[1]), dtype=dtype)
    else:
        x_factor, g_factor, scale = align(x_scale, quantized.pop(), w_scale, x_is_payload=x.dtype == E4M3)
        g_payload = transpose(quantized.pop(), g_factor)
        x_payload = transpose(x, x_factor)
        gradient = scaled_product(g_payload, x_payload, scale, None, dtype=dtype, **options.of_product(2))
    parts = gradient.split(sizes)
    return [part if needed else None for part, needed in zip(parts, needs, strict=True)]


class ScaledLinearFunction(torch.autograd.Function):
    """``[..., K]`` to ``[..., N_i]`` of each weight; arguments after the first three are weights, then biases."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, options: Float8Options, before: BeforeOutput | None, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(parameters) // 2
        weights: Any = parameters[:count]
        sizes = [weight.shape[0] for weight in weights]
        rows = backend.as_rows(x, x.shape[-1])
        x_payload, x_scale = quantize_rows(rows)
        payloads, w_scale = quantize_weights(weights)
        channel_scale = channel_scales(w_scale)
        saved = [*weights, channel_scale, *((x, x_scale) if any(ctx.needs_input_grad[3 : 3 + count]) else ())]
        if before is not None:
            before(saved)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)  # layers whose outputs nobody used get no gradients of zeros
        ctx.options, ctx.count, ctx.x_shape, ctx.x_dtype = options, count, x.shape, x.dtype
        settings = {"dtype": backend.autocast_dtype(x.device.type) or x.dtype, **options.of_product(0, x.shape[-1])}
        return tuple(
            backend.reshaped(scaled_product(x_payload, payload, x_scale, scale, bias=bias, **settings), x.shape[:-1])
            for payload, scale, bias in zip(payloads, w_scale.split(sizes), parameters[count:], strict=True)
        )

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        options: Float8Options = ctx.options
        count = ctx.count
        needs_weights, needs_biases = ctx.needs_input_grad[3 : 3 + count], ctx.needs_input_grad[3 + count :]
        saved = ctx.saved_tensors  # read once, as PyTorch's activation checkpointing asks
        weights, w_scale, inputs = saved[:count], saved[count], saved[count + 1 :]
        like = next((grad for grad in grads if grad is not None), None)
        if like is None:
            return (None,) * (3 + 2 * count)
        rows = [
            like.new_zeros(ctx.x_shape[:-1].numel(), len(weight))
            if grad is None
            else backend.as_rows(grad, len(weight))
            for grad, weight in zip(grads, weights, strict=True)
        ]
        are_used = [grad is not None for grad in grads]
        needs_weights, needs_biases = (
            [need and is_used for need, is_used in zip(needs, are_used, strict=True)]
            for needs in (needs_weights, needs_biases)
        )
        quantized = list(quantize_rows(rows, w_scale))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = input_gradient(weights, w_scale, quantized, like.dtype, options)
            grad_x = grad_x.to(ctx.x_dtype).view(ctx.x_shape)
        inputs = (*(backend.as_rows(x, x.shape[-1]) for x in inputs[:1]), *inputs[1:])
        grad_weights = weight_gradients(weights, needs_weights, inputs, rows, quantized, w_scale, options)
        grad_biases = [
            g.sum(dim=0).to(weights[0].dtype) if need else None for g, need in zip(rows, needs_biases, strict=True)
        ]
        return grad_x, None, None, *grad_weights, *grad_biases


def scaled_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    options: Float8Options = DEFAULT_OPTIONS,
    before_output: BeforeOutput | None = None,
) -> tuple[Tensor, ...]:
    """``x W^T + bias`` of linear layers that share an input, in float8.

    Args:
        x: ``[..., in_features]``, of float32 or bfloat16. Any number of rows.
        weights: ``[out_features, in_features]`` each, both sizes multiples of 16.
        biases: ``[out_features]`` each, or None.
        options: How to multiply.
        before_output: Called before the products with the tensors that are then saved for backward.

    Returns:
        ``[..., out_features]`` of each layer, in autocast's dtype or x's.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point.
        ValueError: For shapes that do not fit, sizes that are no multiples of 16, and dtypes without float8 products.
    """
    biases = [None] * len(weights) if biases is None else biases
    if len(weights) == 0:
        raise wrong_value("weights", "at least one", weights)
    if len(biases) != len(weights):
        raise wrong_value("biases", f"as many as weights, {len(weights)}", biases)
    for weight, bias in zip(weights, biases, strict=True):
        check_floating_tensors("x", x, weight=weight, optional=False)
        check_floating_tensors("x", x, bias=bias)
        check_linear(x, weight)
        check_shape("bias", bias, weight.shape[:1], "one for each row of the weight")
    result: tuple[Tensor, ...] = ScaledLinearFunction.apply(x, options, before_output, *weights, *biases)
    return result


def check_linear(x: Tensor, weight: Tensor) -> None:
    """Raises if there is no float8 product of ``x`` and ``weight``."""
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype not in DTYPES:
            raise wrong_value(name, "of float32 or bfloat16, for float8 products", tensor)
    if x.dim() == 0:
        raise wrong_value("x", "[..., in_features]", x)
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise wrong_value("weight", f"[out_features, {x.shape[-1]}]", weight)
    if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE or weight.numel() == 0:
        raise wrong_value("weight", f"of sizes that are multiples of {MULTIPLE}, for float8 products", weight)
