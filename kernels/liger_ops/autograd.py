"""Makes one differentiable function of an op, the op of its gradients and its reference."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.recipes import made


def differentiable(
    name: str,
    reference: Callable[..., Tensor],
    forward: Callable[..., Sequence[Tensor]],
    backward: Callable[..., list[Tensor]],
    *,
    keeps_inputs: bool = True,
) -> Callable[..., Tensor]:
    """A function of tensors or None and, last, a tuple of options.

    Args:
        name: Of the autograd function, for messages.
        reference: ``reference(*tensors, *options)`` in plain PyTorch, which runs where there are no kernels.
        forward: The op, called likewise; returns y, and what else backward needs.
        backward: The op ``(grad_y, *tensors, *others, *options, needs)``, which returns the gradients that are needed.
        keeps_inputs: Whether backward gets the tensors; if not, it gets y in their place.
    """

    def function_forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, options = args
        y, *others = forward(*tensors, *options)
        ctx.save_for_backward(*(tensors if keeps_inputs else [y]), *others)
        ctx.options = options
        return y

    @backend.once_differentiable
    def function_backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        needs = list(ctx.needs_input_grad[:-1])
        gradients = backward(grad_y, *ctx.saved_tensors, *ctx.options, needs)
        return *backend.spread(gradients, needs), None

    methods = {"forward": staticmethod(function_forward), "backward": staticmethod(function_backward)}
    function: Any = type(name, (torch.autograd.Function,), methods)

    def run(*args: Any) -> Tensor:
        *tensors, options = args
        if not backend.runs_on_triton(*tensors):
            return reference(*tensors, *options)
        if not backend.needs_graph(*tensors):
            return forward(*tensors, *options)[0]
        return made(function.apply(*args), run, *args, keeps_inputs=keeps_inputs)

    return run
