"""Gradients of logits that would miss a part, because a loss was computed without the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

WATCHES = frozenset(("register_hook", "register_post_accumulate_grad_hook", "retain_grad"))
"""Methods that show the gradient of a tensor."""
GATHERING_ENGINES = ("torch.distributed.fsdp.", "deepspeed.")
_ENGINES = ("torch.distributed.", "torch.nn.parallel.", "lightning.", "lightning_fabric.", "deepspeed.", "accelerate.")


class Bypassed(Tensor):
    """A real tensor that was lazy, and from which something was computed whose gradient does not pass it.

    It refuses to show its gradient, from which that part would be missing, and otherwise is a plain tensor.
    """

    bypassed_by: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        watched = args[:1] if name in WATCHES and not is_engines(*args[1:], **kwargs) else ()
        if func is torch.autograd.grad:
            name, watched = "torch.autograd.grad", kwargs.get("inputs", args[1:2])
        for tensor in found(Bypassed, watched):
            refuse_bypassed(name, tensor.bypassed_by)
        return Tensor.__torch_function__(func, (), args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def refuse_bypassed(name: str, bypassed_by: str) -> None:
    raise RuntimeError(
        f"{name} of an LM head's lazy output comes after {bypassed_by}, whose gradient does not flow through the"
        f" output. Call lightning_liger.materialize(logits) before {bypassed_by}"
    )


def is_engines(hook: Any = None, engines: tuple[str, ...] = _ENGINES) -> bool:
    """Whether a hook is that of an engine, which only wants to know when backward comes by."""
    while isinstance(hook, partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', None)}.".startswith(engines)


def found(kind: type | tuple[type, ...], tree: Any) -> list[Any]:
    """The objects of a class in a function's arguments or result."""
    if isinstance(tree, kind):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [each for value in values for each in found(kind, value)]
