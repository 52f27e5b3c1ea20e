"""Checks of arguments, one for each kind: the error names the argument, what was expected and the value.

A value of a wrong type raises TypeError, a value out of range ValueError.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import os
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

_MAX_SHOWN = 200
_NUMBERS = {int: (numbers.Integral, torch.SymInt), float: (numbers.Real, torch.SymInt, torch.SymFloat)}
_FLOATING = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


def shown(value: object) -> str:
    """``value`` as error messages show it: tensors and modules by their kind, all others by a short ``repr``."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype} on {value.device}"
    if isinstance(value, torch.nn.Module):
        return f"the module {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def wrong_type(name: str, expected: str, value: object) -> TypeError:
    """The error for a value that is of no type that ``name`` takes."""
    return TypeError(f"{name} must be {expected}, got {shown(value)}")


def wrong_value(name: str, expected: str, value: object) -> ValueError:
    """The error for a value of the right type that ``name`` does not take."""
    return ValueError(f"{name} must be {expected}, got {shown(value)}")


def did_you_mean(value: object, names: Iterable[Any], *, most: int = 1, cutoff: float = 0.6) -> str:
    """`` (did you mean 'a', 'b' or 'c'?)`` with the names that are most similar to ``value``; empty if none is.

    Strings are compared, without regard to case; those that contain ``value`` come first. ``cutoff`` is how similar
    they must be, from 0 to 1.
    """
    if not isinstance(value, str) or not value:
        return ""
    wanted = value.lower()
    known = {name.lower(): name for name in names if isinstance(name, str)}
    found = difflib.get_close_matches(wanted, [name for name in known if wanted in name], n=most, cutoff=0.0)
    found += difflib.get_close_matches(wanted, known, n=most, cutoff=cutoff)
    close = [repr(known[name]) for name in dict.fromkeys(found)][:most]
    parts = [", ".join(close[:-1]), close[-1]] if close else []
    return f" (did you mean {' or '.join(filter(None, parts))}?)" if close else ""


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    optional: bool = False,
) -> None:
    """Raises unless ``value`` is a finite number within the bounds, or None if ``optional``.

    Tensors are refused: an option is a constant, and a learnable one would get no gradient.
    """
    _check_real(float, name, value, (above, at_least, below, at_most), optional)


def check_integer(
    name: str,
    value: Any,
    *,
    at_least: int | None = None,
    at_most: int | None = None,
    optional: bool = False,
) -> None:
    """Raises unless ``value`` is an integer (and not a bool) within the bounds, or None if ``optional``."""
    if isinstance(value, int) and value.bit_length() > 63:  # no number of torch's
        at_most, at_least = 2**63 - 1 if at_most is None else at_most, -(2**63) if at_least is None else at_least
    _check_real(int, name, value, (None, at_least, None, at_most), optional)


def _check_real(python_type: type, name: str, value: Any, bounds: tuple[Any, ...], optional: bool) -> None:
    if value is None and optional:
        return
    above, at_least, below, at_most = bounds
    is_real = type(value) in (int, python_type) or (
        isinstance(value, _NUMBERS[python_type]) and not isinstance(value, bool)
    )
    if (
        is_real
        and (above is None or value > above)
        and (at_least is None or value >= at_least)
        and (below is None or value < below)
        and (at_most is None or value <= at_most)
        and (python_type is int or -math.inf < value < math.inf)
    ):
        return
    words = zip(("above", "of at least", "below", "at most"), bounds, strict=True)
    text = " and ".join(f"{word} {bound}" for word, bound in words if bound is not None)
    kind = "an integer" if python_type is int else "a finite number"
    expected = f"{kind}{' ' if text else ''}{text}{' or None' if optional else ''}"
    raise (wrong_value if is_real else wrong_type)(name, expected, value)


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raises unless ``value`` is one of ``choices``."""
    try:
        if not isinstance(value, Tensor) and value in choices:
            return
    except (TypeError, ValueError):  # not hashable, or an array that compares its elements
        pass
    error = wrong_value(name, f"one of {', '.join(map(repr, choices))}", value)
    raise ValueError(f"{error}{did_you_mean(value, choices)}")


def check_bool(name: str, value: Any, *, optional: bool = False) -> None:
    """Raises unless ``value`` is True or False, or None if ``optional``; "no" and 0 would count as something else."""
    if not isinstance(value, bool) and not (optional and value is None):
        raise wrong_type(name, f"True or False{', or None' if optional else ''}", value)


def check_tensor(name: str, value: Any, *, optional: bool = False) -> None:
    """Raises unless ``value`` is a tensor of any dtype, or None if ``optional``."""
    if not isinstance(value, Tensor) and not (optional and value is None):
        raise wrong_type(name, f"a tensor{' or None' if optional else ''}", value)


def check_floating(name: str, value: Any, *, optional: bool = False) -> None:
    """Raises unless ``value`` is a tensor of 16 to 64 bits floating point, or None if ``optional``."""
    if optional and value is None:
        return
    if not isinstance(value, Tensor) or value.dtype not in _FLOATING:
        expected = "a floating-point tensor (float32, bfloat16, float16 or float64)"
        raise wrong_type(name, f"{expected}{' or None' if optional else ''}", value)


def check_shape(name: str, value: Tensor | None, shape: Collection[int], expected: str = "") -> None:
    """Raises unless the tensor, if there is one, has ``shape``; ``expected`` says what the shape stands for."""
    if value is not None and tuple(value.shape) != tuple(shape):
        raise wrong_value(name, f"a tensor of shape {tuple(shape)}{expected and f' ({expected})'}", value)


def check_single(**tensors: Tensor) -> None:
    """Raises unless each is one number, of shape ``[1]`` or ``[]``."""
    for name, value in tensors.items():
        if value.dim() > 1 or value.numel() != 1:
            raise wrong_value(name, "a tensor of shape [1] or []", value)


def check_same_device(name: str, tensor: Tensor, **others: Any) -> None:
    """Raises unless each of ``others`` is a tensor on the device of ``tensor``, or None.

    A kernel that gets a tensor of another device reads memory that is not there, and a meta tensor has no values.
    """
    device = tensor.device
    for other, value in others.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise wrong_type(other, "a tensor or None", value)
        if value.device != device:
            raise wrong_value(other, f"on {name}'s device {device}", value)


def check_floating_tensors(name: str, tensor: Any, /, *, optional: bool = True, **others: Any) -> None:
    """Raises unless all are real floating-point tensors on one device; ``others`` may be None if ``optional``."""
    check_floating(name, tensor)
    device = tensor.device
    for other, value in others.items():
        if value is None and optional:
            continue
        if not isinstance(value, Tensor) or value.dtype not in _FLOATING or value.device != device:
            check_floating(other, value, optional=optional)
            check_same_device(name, tensor, **{other: value})


def check_pair(name: str, pair: Any, other: str, tensor: Tensor) -> None:
    """Raises unless ``pair`` is two real floating-point tensors on the device of ``tensor``, the argument ``other``."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise wrong_type(name, "a pair of tensors or None", pair)
    check_floating_tensors(other, tensor, optional=False, **{f"{name}[{i}]": each for i, each in enumerate(pair)})


def as_integers(name: str, value: Any) -> tuple[int, ...]:
    """``value`` as a tuple; raises unless it is a sequence of integers."""
    try:
        return tuple(map(operator.index, value))
    except TypeError:
        raise wrong_type(name, "a sequence of integers", value) from None


def check_floating_dtype(name: str, value: Any) -> None:
    """Raises unless ``value`` is a dtype of :func:`check_floating`'s tensors, ``float``, or None for the default."""
    if value is not None and value is not float and not (isinstance(value, torch.dtype) and value in _FLOATING):
        raise wrong_type(name, "torch.float32, bfloat16, float16 or float64, or None", value)


def check_device(name: str, value: Any) -> None:
    """Raises unless ``value`` names a device, or is None for the default."""
    if value is not None:
        try:
            torch.device(value)
        except (RuntimeError, TypeError):
            raise wrong_value(name, "a device, such as 'cpu' or 'cuda:0', or None", value) from None


def check_path(name: str, value: Any, *, optional: bool = False) -> None:
    """Raises unless ``value`` is a path that is not empty, as a str or an ``os.PathLike``, or None if ``optional``."""
    _check_filled(name, value, str | os.PathLike, "a path", optional)


def check_text(name: str, value: Any, *, optional: bool = False) -> None:
    """Raises unless ``value`` is a string that is not empty, or None if ``optional``."""
    _check_filled(name, value, str, "a string", optional)


def _check_filled(name: str, value: Any, kind: Any, text: str, optional: bool) -> None:
    if value is None and optional:
        return
    expected = f"{text} that is not empty{' or None' if optional else ''}"
    if not isinstance(value, kind):
        raise wrong_type(name, expected, value)
    if not os.fspath(value):
        raise wrong_value(name, expected, value)
