"""The table of PyTorch's functions that lazy tensors compute without their values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Operation(NamedTuple):
    """How lazy tensors compute a function of PyTorch; see :func:`implements`."""

    function: Callable[..., Any]
    signature: inspect.Signature
    is_commutative: bool
    takes_lazy_arguments: bool


operations: dict[str, Operation] = {}


def implements(
    *names: str, commutative: bool = False, takes_lazy_arguments: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a function that computes PyTorch's functions, methods and properties of these names.

    The decorated function gets the lazy tensor and the call's other arguments. It returns ``NotImplemented`` where it
    needs the real values; a call with arguments that its signature does not have gets real values too.

    Args:
        names: As in ``torch`` and ``torch.Tensor``. An operator or in-place method (``mul_``) uses the function that
            returns its result (``mul``).
        commutative: Whether the lazy tensor may also be the second of two arguments.
        takes_lazy_arguments: Whether arguments other than the first may be or contain lazy tensors.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        operation = Operation(function, inspect.signature(function), commutative, takes_lazy_arguments)
        operations.update(dict.fromkeys(names, operation))
        return function

    return register


def name_out_of_place(name: str) -> str | None:
    """The name of the function that returns the value which the in-place function ``name`` writes, or None."""
    if name in ("__setitem__", "__set__"):
        return name
    if name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"):
        return f"__{name[3:]}"
    return name[:-1] if name.endswith("_") and not name.endswith("__") else None
