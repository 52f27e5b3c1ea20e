"""Gradients of logits that would miss a part, because a loss was computed without the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T", bound=Tensor)

WATCHES = frozenset(("register_hook", "register_post_accumulate_grad_hook", "retain_grad"))
"""Methods that show the gradient of a tensor."""

_LEAVES = frozenset((int, float, bool, str, slice, type(None), type(...), torch.dtype, torch.device, Tensor))
"""Classes of arguments that contain no tensors of a class other than ``Tensor``."""

_GATHERING_ENGINES = ("torch.distributed.fsdp.", "deepspeed.")
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
        if name in WATCHES and isinstance(args[0], Bypassed) and not is_engines(*args[1:], **kwargs):
            refuse_bypassed(name, args[0].bypassed_by)
        if func is torch.autograd.grad:
            inputs = kwargs.get("inputs", args[1:2])
            for bypassed in found(Bypassed, inputs):
                refuse_bypassed("torch.autograd.grad", bypassed.bypassed_by)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def refuse_bypassed(name: str, bypassed_by: str) -> None:
    """Raises the RuntimeError for showing a gradient by ``name`` after ``bypassed_by``."""
    raise RuntimeError(
        f"{name} of an LM head's lazy output comes after {bypassed_by}, whose gradient does not pass the output. Call"
        f" lightning_liger.materialize(logits) before {bypassed_by}"
    )


def is_engines(hook: Any = None) -> bool:
    """Whether a hook is that of an engine, which only wants to know when backward comes by."""
    return _module_of(hook).startswith(_ENGINES)


def is_gathering_engines(hook: Any) -> bool:
    """Whether a hook is that of an engine that gathers parameters for each use."""
    return _module_of(hook).startswith(_GATHERING_ENGINES)


def _module_of(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', None)}."


def found(kind: type[_T], tree: Any) -> Iterator[_T]:
    """The tensors of a class in a function's arguments."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (list, tuple)):  # the quick checks first: an abstract class takes the most time
        for value in tree:
            if type(value) not in _LEAVES:
                yield from found(kind, value)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            if type(value) not in _LEAVES:
                yield from found(kind, value)
