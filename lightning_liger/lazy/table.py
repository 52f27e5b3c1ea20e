"""What lazy tensors do with PyTorch's functions: those that they compute without values, and kinds of others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

PLAIN = {
    *("size", "dim", "ndimension", "nelement", "numel", "stride", "storage_offset", "is_contiguous"),
    *("element_size", "get_device", "dim_order", "has_names", "is_floating_point", "is_complex"),
    *("is_signed", "is_conj", "is_neg", "is_inference", "__len__", "__hash__"),
}
"""Functions that PyTorch answers without values."""

NEED_NO_VALUES = {
    "result_type": 0,
    **dict.fromkeys(("to", "type_as", "view_as", "expand_as", "reshape_as", "is_same_size"), 1),
}
"""Functions that need no values of the arguments from this position on."""

LIKE = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"),
}
"""Functions that make a tensor of the same layout or kind."""

SHOWS_MEMORY = {
    *("numpy", "__array__", "data_ptr", "storage", "untyped_storage", "__dlpack__", "to_dlpack"),
    *("__cuda_array_interface__", "is_set_to"),
}

VIEWS = {
    *("__getitem__", "as_strided", "chunk", "detach", "diagonal", "dsplit", "expand", "flatten", "hsplit"),
    *("moveaxis", "movedim", "narrow", "permute", "ravel", "reshape", "reshape_as", "select", "split"),
    *("squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold"),
    *("unsqueeze", "view", "view_as", "vsplit"),
}
"""Functions that usually return a view; others are recognized by their result."""

COMPARISONS = {
    *("gt", "greater", "ge", "greater_equal", "lt", "less", "le", "less_equal"),
    *("eq", "ne", "not_equal", "equal"),
}
"""Functions that tell values apart which differ by rounding only."""

READS = frozenset(("gather", "take_along_dim", "__getitem__", "max", "min", "amax", "amin", "topk"))
"""Functions that may return some of the values, which may be rounded differently where they get a gradient."""


class Operation(NamedTuple):
    """How lazy tensors compute a function of PyTorch; see :func:`implements`."""

    function: Callable[..., Any]
    is_commutative: bool


operations: dict[str, Operation] = {}


def implements(*names: str, commutative: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a function that computes PyTorch's functions, methods and properties of these names.

    The decorated function gets the call's arguments, of which only the first is lazy; if it is commutative, the lazy
    tensor may also be the second of two, or both. It returns ``NotImplemented`` where it needs the real values; a call
    with arguments that its signature does not have gets real values too.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        operations.update(dict.fromkeys(names, Operation(function, commutative)))
        return function

    return register


@functools.cache
def accepts(function: Callable[..., Any], num_positional: int, *keywords: str) -> bool:
    """Whether a signature has as many positional arguments and these names of keyword arguments."""
    try:
        inspect.signature(function).bind(*(None,) * num_positional, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


@functools.cache
def name_of(func: Callable[..., Any]) -> tuple[str, bool]:
    """The name of a function, method or property of PyTorch, and whether it is answered without values."""
    name = getattr(func, "__name__", str(func))
    if type(func).__module__ == "torch._ops" and not str(func).startswith("aten."):
        return str(func), False  # somebody's own op, whose name says nothing
    if name == "__set__":
        return f"setting {getattr(getattr(func, '__self__', None), '__name__', 'a property')}", False
    if name != "__get__":
        return name, name in PLAIN
    name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name, name not in operations and name not in SHOWS_MEMORY


@functools.cache
def name_out_of_place(name: str) -> str | None:
    """The name of the function that returns the value which the in-place function ``name`` writes, or None."""
    if name == "__setitem__" or name.startswith("setting "):
        return name
    if name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"):
        return f"__{name[3:]}"
    return name[:-1] if name.endswith("_") and not name.endswith("__") else None
