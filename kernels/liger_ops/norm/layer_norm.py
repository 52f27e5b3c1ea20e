"""LayerNorm: y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(mean((x - mean)**2) + eps).

Statistics, products and the gradients of weight and bias are float32 for every half-precision input, and y is rounded
once; squares are taken of centred values, so a large mean costs no accuracy. With n = (x - mean) * rstd,

    dx = rstd * (dy * weight - n * mean(dy * weight * n) - mean(dy * weight))
    dweight = sum over rows of dy * n        dbias = sum over rows of dy

Saved: x, weight, bias, rstd and mean (8 bytes a row). The kernels are in ``liger_ops.norm.kernels``.
Source: arXiv:1607.06450.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import backend
from liger_ops.norm.checks import as_number, check_row_norm
from liger_ops.norm.launch import MAX_HIDDEN_SIZE, launch_backward, launch_forward
from liger_ops.norm.residual import connect, take
from liger_ops.recipes import made


def layer_norm_reference(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """PyTorch's own LayerNorm in float32 or wider, rounded to x's dtype."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if tensor is None else tensor.to(dtype) for tensor in (weight, bias))
    return F.layer_norm(x.to(dtype), tuple(normalized_shape), weight, bias, eps).to(x.dtype)


def _layer_norm_forward_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, hidden_size: int, eps: float
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape)
    statistics = x.new_empty((2, x.numel() // hidden_size), dtype=torch.float32)
    return y, statistics


@backend.register_op(
    "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, SymInt hidden_size, float eps) -> (Tensor, Tensor)",
    fake=_layer_norm_forward_fake,
)
def _layer_norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, hidden_size: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns y of x's shape, and rstd and mean of each row."""
    y, statistics = _layer_norm_forward_fake(x, weight, bias, hidden_size, eps)
    launch_forward(x, weight, bias, hidden_size, y=y, statistics=statistics, centered=True, eps=eps)
    return y, statistics


def _layer_norm_backward_fake(
    grad_y: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    hidden_size: int,
    needs_grad_x: bool,
    needs_grad_weight: bool,
    needs_grad_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = x.new_empty(x.shape if needs_grad_x else 0)
    grad_weight = x.new_empty(0) if weight is None or not needs_grad_weight else weight.new_empty(weight.shape)
    grad_bias = x.new_empty(0) if bias is None or not needs_grad_bias else bias.new_empty(bias.shape)
    return grad_x, grad_weight, grad_bias


@backend.register_op(
    "layer_norm_backward(Tensor grad_y, Tensor? grad_total, Tensor x, Tensor? weight, Tensor? bias, Tensor statistics,"
    " SymInt hidden_size, bool needs_grad_x, bool needs_grad_weight, bool needs_grad_bias) -> (Tensor, Tensor, Tensor)",
    fake=_layer_norm_backward_fake,
)
def _layer_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    hidden_size: int,
    needs_grad_x: bool,
    needs_grad_weight: bool,
    needs_grad_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, with ``grad_total`` added, weight and bias; those not needed come back empty."""
    grad_x, grad_weight, grad_bias = _layer_norm_backward_fake(
        grad_y, grad_total, x, weight, bias, statistics, hidden_size, needs_grad_x, needs_grad_weight, needs_grad_bias
    )
    launch_backward(
        x, grad_y, weight, statistics, hidden_size,
        centered=True,
        grad_total=grad_total,
        grad_x=grad_x if needs_grad_x else None,
        grad_weight=grad_weight if needs_grad_weight else None,
        grad_bias=grad_bias if needs_grad_bias else None,
    )  # fmt: skip
    return grad_x, grad_weight, grad_bias


class LayerNormFunction(torch.autograd.Function):
    """Ties the two ops together for autograd."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, hidden_size: int, eps: float
    ) -> Tensor:
        y, statistics = _layer_norm_forward(x, weight, bias, hidden_size, eps)
        ctx.save_for_backward(x, weight, bias, statistics)
        ctx.hidden_size = hidden_size
        return y

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:3]
        gradients = _layer_norm_backward(grad_y, take(ctx), *ctx.saved_tensors, ctx.hidden_size, *needs)
        wanted = (gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True))
        return *wanted, None, None


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Returns ``(input - mean) / sqrt(variance + eps) * weight + bias``, as ``F.layer_norm`` does.

    Args:
        input: ``[*, *normalized_shape]``, typically ``[batch_size, seq_len, hidden_size]``.
        normalized_shape: The trailing dimensions that mean and variance go over.
        weight: Of ``normalized_shape``, in any floating dtype; None for 1.
        bias: Of ``normalized_shape``, in any floating dtype; None for 0.
        eps: Added to the variance, at least 0.

    Returns:
        A contiguous tensor of input's shape and dtype.

    Raises:
        TypeError: If a tensor is none, or not real and floating-point, or another argument is of a wrong type.
        ValueError: If the shapes or devices do not fit together, or eps is negative or not finite.
    """
    shape = check_row_norm(input, normalized_shape, weight=weight, bias=bias)
    eps = as_number("eps", eps, at_least=0)
    return _compute(input, weight, bias, shape, eps)


def _compute(input: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...], eps: float) -> Tensor:
    hidden_size = math.prod(shape)
    if not backend.runs_on_triton(input, weight, bias) or hidden_size > MAX_HIDDEN_SIZE:
        return layer_norm_reference(input, shape, weight, bias, eps)
    if not backend.needs_graph(input, weight, bias):
        return _layer_norm_forward(input, weight, bias, hidden_size, eps)[0]
    y = connect(LayerNormFunction.apply(input, weight, bias, hidden_size, eps), input)
    return made(y, _compute, input, weight, bias, shape, eps)
