"""Residual connections: the gradient that goes past a norm joins, in the norm's backward, the one that goes through it.

In ``total = x + f(norm(x))``, autograd would add the gradient of ``total`` to that of the norm in a kernel of its own.
When the next norm gets ``total``, the node of the sum learns which norm has ``x``. In backward, which reaches the sum
first, it hands that norm the gradient of ``x``, and itself passes on none. Values are those of autograd but for one
rounding less; all that sees gradients of ``x`` sees their sum.
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

_NORM, _CONNECTED = "liger_ops.norm", "liger_ops.connected"
"""Keys in the metadata of nodes: with an output's number, of a norm of that output; of a sum that has got its hook."""
_Gradients = tuple[Tensor | None, ...]


def connect(y: Tensor, x: Tensor) -> Tensor:
    """Returns ``y``, the norm of ``x``, as its autograd Function returned it; call it right after that.

    The Function's backward must call :func:`take` and add what that returns to the gradient of ``x``.
    """
    if torch.compiler.is_compiling():
        return y
    node: Any = y.grad_fn
    source, index = node.next_functions[0]
    if source is not None:
        node.residuals = {}  # by backward pass, of which several may run at once; None where the norm's is over
        node.input_like = x.shape, x.dtype
        source.metadata[_NORM, index] = weakref.ref(node)  # a strong one would be a cycle, which is never freed
    total: Any = x.grad_fn
    if total is not None and total.name() == "AddBackward0" and _CONNECTED not in total.metadata:
        for place, (summand, index) in enumerate(total.next_functions):
            norm = None if summand is None else summand.metadata.get((_NORM, index))
            if norm is not None:
                total.metadata[_CONNECTED] = True
                total.register_hook(partial(_hand_over, norm, place))
                break
    return y


def _hand_over(norm: "weakref.ref[Any]", place: int, gradients: _Gradients, _: _Gradients) -> _Gradients | None:
    """Leaves one of the sum's ``gradients`` to a norm whose backward is still to come; None changes nothing."""
    if torch.compiler.is_compiling():  # compiled autograd
        return None
    node, gradient = norm(), gradients[place]
    task = torch._C._current_graph_task_id()
    if (
        node is None
        or type(gradient) is not Tensor
        or gradient.layout is not torch.strided
        or task == -1
        or task in node.residuals
        or (gradient.shape, gradient.dtype) != node.input_like  # a hook before this one may have changed it
        or not torch._C._will_engine_execute_node(node)
    ):
        return None
    node.residuals[task] = gradient, _stream(gradient)
    return (*gradients[:place], None, *gradients[place + 1 :])


def take(node: Any) -> Tensor | None:
    """What the running backward of a norm must add to its input's gradient, of the input's shape and dtype, or None."""
    if torch.compiler.is_compiling():
        return None
    residuals, task = getattr(node, "residuals", {}), torch._C._current_graph_task_id()
    residual, residuals[task] = residuals.get(task), None
    if residual is None:
        return None
    gradient, stream = residual
    if (own := _stream(gradient)) != stream:
        own.wait_stream(stream)
        gradient.record_stream(own)
    return gradient


def _stream(tensor: Tensor) -> Any:
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
