"""What every op shares: which path a tensor takes, and how a launcher becomes a ``torch.library`` op."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function

_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LIBRARY = torch.library.Library("liger_ops", "DEF")


def use_triton(tensor: Tensor) -> bool:
    """Whether ops on ``tensor`` launch Triton kernels; elsewhere they run the PyTorch reference."""
    return tensor.is_cuda and tensor.dtype in _TRITON_DTYPES


def register_op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated launcher as ``torch.ops.liger_ops.<name of schema>`` and returns that op.

    Args:
        schema: The op's schema without its namespace, ``"name(Tensor x, float eps) -> Tensor"``.
        fake: Same signature as the launcher; allocates the outputs without computing them, for the compiler.
    """

    def register(launcher: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, launcher, "CompositeExplicitAutograd")
        torch.library.register_fake(f"liger_ops::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.liger_ops, name).default

    return register


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's decorator of that name, which also refuses when only forward's inputs need a second gradient.

    PyTorch's looks at the incoming gradient alone, which rarely needs one: a penalty on the gradients would silently
    lose its own gradient.
    """
    marked = function.once_differentiable(lambda ctx, marker, *grad_outputs: backward(ctx, *grad_outputs))

    @functools.wraps(backward)
    def wrapper(ctx, *grad_outputs):
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return marked(ctx, None, *grad_outputs)
        return marked(ctx, torch.empty((), requires_grad=True), *grad_outputs)

    return wrapper
