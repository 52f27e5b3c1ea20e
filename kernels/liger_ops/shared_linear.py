"""Linear layers that share their input: matrix products sum its gradient, where autograd would add those of each layer.

    y_i = x W_i^T        dx = sum_i dy_i W_i        dW_i = dy_i^T x

dx is rounded once a layer, as a sum of products in float32 with what was summed before.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import backend


class SharedLinearFunction(torch.autograd.Function):
    """Ties forward and backward together for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_grad_x, *needs_grad_weights = ctx.needs_input_grad
        x, *weights = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        grad_x: Tensor | None = None
        grad_weights: list[Tensor | None] = [None] * len(weights)
        for index, grad_y in reversed(list(enumerate(grad_outputs))):
            if grad_y is None:
                continue
            grad_rows = grad_y.reshape(-1, grad_y.shape[-1])
            if needs_grad_x:
                weight = weights[index]
                if grad_x is None:
                    grad_x = grad_rows @ weight
                else:
                    torch.addmm(grad_x, grad_rows, weight, out=grad_x)
            if needs_grad_weights[index]:
                grad_weights[index] = grad_rows.t() @ rows
        return None if grad_x is None else grad_x.view(x.shape), *grad_weights


def shared_linear(input: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns ``F.linear(input, weight)`` for each of ``weights``.

    Args:
        input: ``[*, in_features]``.
        weights: Each ``[out_features, in_features]``, in the dtype of ``input``, which autocast does not change.

    Returns:
        A tensor ``[*, out_features]`` for each weight.
    """
    if not backend.needs_graph(input, *weights):
        return tuple(F.linear(input, weight) for weight in weights)
    outputs: tuple[Tensor, ...] = SharedLinearFunction.apply(input, *weights)
    return outputs
