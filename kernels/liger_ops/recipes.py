"""How to recompute outputs of ops in backward instead of keeping them.

An op tells the listener of its thread, if there is one, which function made its output from which arguments. The ops
here cost a few reads and writes of memory, and their inputs are saved for backward in any case.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

_Outputs = TypeVar("_Outputs", bound=Tensor | tuple[Tensor, ...])


Listener = Callable[[tuple[Tensor, ...], Callable[..., Any], Sequence[Any], bool], None]
"""Learns how outputs were made: called with outputs, the function and the arguments that return them, and whether the
inputs are saved for backward."""


class _State(threading.local):
    listener: Listener | None = None


_state = _State()


def made(outputs: _Outputs, function: Callable[..., Any], *args: Any, keeps_inputs: bool = True) -> _Outputs:
    """Returns ``outputs``, new tensors that autograd just recorded, after telling the listener how to make them.

    ``function(*args)`` returns the same values, shapes and strides. ``keeps_inputs`` says whether backward needs all
    tensors in ``args`` that may require gradients, so that they stay alive and writes to them are errors anyway.
    """
    if torch.compiler.is_compiling():  # the compiler decides by itself what it keeps
        return outputs
    listener = _state.listener
    if listener is not None:
        listener(outputs if isinstance(outputs, tuple) else (outputs,), function, args, keeps_inputs)
    return outputs


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Makes ``listener`` this thread's, None for nobody."""
    before = _state.listener
    _state.listener = listener
    try:
        yield
    finally:
        _state.listener = before
