"""Makes one differentiable function of a reference and what launches its kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.recipes import made


def differentiable(
    name: str,
    reference: Callable[..., Tensor],
    forward: Callable[..., None],
    backward: Callable[..., None],
    *,
    allocate: Callable[..., list[Tensor]] = lambda x, *_: [x.new_empty(x.shape)],
    others: Sequence[str] = (),
    keeps_inputs: bool = True,
    fits: Callable[..., bool] = lambda *_: True,
) -> Callable[..., Tensor]:
    """A function of tensors or None and, last, a tuple of options; runs the ops ``{name}_forward`` and ``_backward``.

    Args:
        name: Of the ops and of the autograd function, for messages.
        reference: ``reference(*tensors, *options)`` in plain PyTorch, which runs where there are no kernels. The ops
            take what its annotations say.
        forward: ``(outputs, *tensors, *options)``, writes the outputs, which are not empty.
        backward: ``(gradients, grad_y, *tensors, *others, *options)``, writes the gradients, None where not needed.
        allocate: ``(*tensors, *options)``, the outputs without values: y, and what else backward needs.
        others: The names of what else backward needs.
        keeps_inputs: Whether backward gets the tensors; if not, it gets y in their place.
        fits: ``(*tensors, *options)``, whether kernels can do it.
    """
    kinds = {key: kind for key, kind in reference.__annotations__.items() if key != "return"}
    are_tensors = {key: kind for key, kind in kinds.items() if kind in (Tensor, Tensor | None)}
    tensors, options = (
        backend.schema_of({key: kind for key, kind in kinds.items() if (key in are_tensors) == wanted})
        for wanted in (True, False)
    )
    saved = [tensors if keeps_inputs else "Tensor y", *(f"Tensor {each}" for each in others)]

    def schema(kind: str, *arguments: str) -> str:
        return f"{name}_{kind}({', '.join(filter(None, arguments))}) -> Tensor[]"

    @backend.register_op(schema("forward", tensors, options), fake=allocate)
    def forward_op(*args: Any) -> list[Tensor]:
        outputs = allocate(*args)
        if outputs[0].numel():
            forward(outputs, *args)
        return outputs

    def empty_gradients(grad_y: Tensor, *args: Any) -> list[Tensor]:
        return backend.empty_gradients(args[: len(args[-1])], args[-1])

    @backend.register_op(schema("backward", "Tensor grad_y", *saved, options, "bool[] needs"), fake=empty_gradients)
    def backward_op(grad_y: Tensor, *args: Any) -> list[Tensor]:
        gradients = empty_gradients(grad_y, *args)
        if grad_y.numel():
            backward(backend.spread(gradients, args[-1]), grad_y, *args[:-1])
        else:
            for gradient in gradients:
                gradient.zero_()
        return gradients

    def function_forward(ctx: Any, *args: Any) -> Tensor:
        *inputs, options = args
        y, *rest = forward_op(*inputs, *options)
        ctx.save_for_backward(*(inputs if keeps_inputs else [y]), *rest)
        ctx.options = options
        return y

    @backend.once_differentiable
    def function_backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        needs = list(ctx.needs_input_grad[:-1])
        gradients = backward_op(grad_y, *ctx.saved_tensors, *ctx.options, needs)
        return *backend.spread(gradients, needs), None

    methods = {"forward": staticmethod(function_forward), "backward": staticmethod(function_backward)}
    function: Any = type(f"{name}_function", (torch.autograd.Function,), methods)

    def run(*args: Any) -> Tensor:
        *inputs, options = args
        if not backend.runs_on_triton(*inputs) or not fits(*inputs, *options):
            return reference(*inputs, *options)
        if not backend.needs_graph(*inputs):
            return forward_op(*inputs, *options)[0]
        return made(function.apply(*args), run, *args, keeps_inputs=keeps_inputs)

    return run
