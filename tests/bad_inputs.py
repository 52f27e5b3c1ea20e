"""Wrong values of every argument of every public function and class, derived from signatures.

``VALID`` in ``valid_calls`` has a right call of each; a wrong value takes the place of one argument. A value is wrong
if its argument's annotation does not admit it. Unless a table there says otherwise, numbers are positive, and strings
are one of a few names. Tensors have another dtype than the right one,
and another device and shape than the call's first tensor asks for.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parent
PACKAGES = ("lightning_liger", "liger_ops")
MODULES = (
    "liger_ops", "liger_ops.nn", "liger_ops.optim", "lightning_liger", "lightning_liger.data",
    "lightning_liger.estimate", "lightning_liger.patching", "lightning_liger.hardware",
)  # fmt: skip


class BadInput(NamedTuple):
    """One wrong call that no signature tells, and what its error must say."""

    call: Callable[..., Any]
    """Makes the call. If it has a parameter ``tmp_path``, it gets an empty folder."""
    mentions: tuple[str, ...]
    """What the message must contain (in any case): the argument, the value as a user wrote it, what was expected."""
    error: type[BaseException] | tuple[type[BaseException], ...] = (TypeError, ValueError)
    """SystemExit for the command line, whose message is what it prints to stderr and whose code must be 2."""
    unchanged: Callable[[], Any] | None = None
    """Returns what the call must leave as it is (compared with ``==``), such as a model's modules."""


def row(call: Callable[..., Any], *mentions: str, **others: Any) -> BadInput:
    """A row of a table, ``BAD_INPUTS`` of a ``bad_inputs_*.py`` file next to the tests of what it calls."""
    return BadInput(call, mentions, **others)


def tables() -> Iterator[tuple[str, BadInput]]:
    """A name for each row of each table, and the row."""
    for path in sorted(ROOT.rglob("bad_inputs_*.py")):
        name = ".".join(("tests", *path.relative_to(ROOT).with_suffix("").parts))
        for number, bad_input in enumerate(importlib.import_module(name).BAD_INPUTS):
            yield f"{name.partition('bad_inputs_')[2]}-{number}-{bad_input.mentions[0]}", bad_input


def public_callables() -> dict[str, Callable[..., Any]]:
    """All that users call, by name; the same object once."""
    found: dict[int, tuple[str, Callable[..., Any]]] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", None) or [each for each in vars(module) if not each.startswith("_")]:
            member = getattr(module, name)
            home = PACKAGES if hasattr(module, "__all__") else module_name
            if callable(member) and member.__module__.startswith(home):
                found.setdefault(id(member), (f"{member.__module__.partition('.')[0]}.{name}", member))
    return dict(found.values())


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of its arguments, also of those that a class hands on to ours that it extends."""
    constructors = [function]
    if inspect.isclass(function):
        ours = [each for each in function.__mro__ if each.__module__.startswith(PACKAGES)]
        constructors = [each.__init__ for each in ours if "__init__" in vars(each)] or [function.__new__]
    found: dict[str, Any] = {}
    for constructor in constructors:
        hints = typing.get_type_hints(constructor)
        parameters = inspect.signature(constructor).parameters.values()
        for parameter in parameters:
            if parameter.name != "self" and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                found.setdefault(parameter.name, hints.get(parameter.name, Any))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return found


def admits(annotation: Any, value: Any) -> bool:
    """Whether a value is of the annotated type; bools are no numbers, and numbers are finite."""
    if isinstance(annotation, dataclasses.InitVar):
        annotation = annotation.type
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or annotation is inspect.Parameter.empty:
        return True
    if annotation is None or annotation is types.NoneType:
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(admits(each, value) for each in arguments)
    if origin is Literal:
        return any(value is each or (type(value) is type(each) and value == each) for each in arguments)
    if origin is type:
        return isinstance(value, type) and issubclass(value, arguments[0])
    if origin in (dict, collections.abc.Mapping):
        return isinstance(value, origin) and all(admits(arguments[0], key) for key in value)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is tuple and Ellipsis not in arguments:
        return isinstance(value, tuple | list) and len(value) == len(arguments)
    if origin is not None:  # of one type of elements
        kind = tuple | list if origin is tuple else origin
        return (
            isinstance(value, kind) and not isinstance(value, str | bytes | Tensor) and admits_all(arguments[0], value)
        )
    if annotation is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if annotation is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return isinstance(value, annotation)


def admits_all(annotation: Any, values: Any) -> bool:
    return isinstance(values, collections.abc.Iterator) or all(admits(annotation, each) for each in values)


UNKNOWN = "no_such_value"
ODD_VALUES: tuple[Any, ...] = (
    None, True, 5, 2.5, math.nan, math.inf, b"x", [5], {5: 5}, 1j, torch.tensor(0.5), nn.Identity(), object(),
)  # fmt: skip
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


class Hints(NamedTuple):
    """What annotations do not say, by names of arguments, or of functions and arguments (``"RMSNorm.offset"``)."""

    least: dict[str, float]
    """The smallest value of numbers; all others are positive."""
    most: dict[str, float]
    """The largest value of numbers that have one."""
    below: dict[str, float]
    """A bound that numbers do not reach."""
    text: frozenset[str]
    """Strings that are no names out of a few."""
    also: dict[str, tuple[Any, ...]]
    """Types and dtypes that are taken although the annotation does not say so."""
    untried: dict[str, str]
    """Arguments that are not tried, and why."""


def named(hints: collections.abc.Collection[str], function: str, name: str) -> str:
    """The name under which an argument is in some hints; empty if it is not."""
    return next((each for each in (f"{function}.{name}", name) if each in hints), "")


def wrong_values(
    function: str, name: str, annotation: Any, right: Any, hints: Hints, *, is_first: bool
) -> Iterator[Any]:
    """Values that an argument does not take, given a right one, and whether that is the first tensor of the call."""
    parts = typing.get_args(annotation) or (annotation,)
    also = hints.also.get(named(hints.also, function, name), ())
    yield from (value for value in ODD_VALUES if not admits(annotation, value) and type(value) not in also)
    if Path in parts:
        yield ""
    elif (str in parts and not named(hints.text, function, name)) or typing.get_origin(annotation) is Literal:
        yield UNKNOWN
    if int in parts or float in parts:
        least, most, below = (named(each, function, name) for each in hints[:3])
        if not least:
            yield from (0, -1)
        elif hints.least[least] > -math.inf:
            yield hints.least[least] - (1 if int in parts else 0.1)
        if most or below:
            yield hints.most[most] + 0.5 if most else hints.below[below]
        if int in parts and type(2**70) not in also:
            yield 2**70
    if isinstance(right, Tensor) and Tensor in parts:
        yield from (right.to(dtype) for dtype in DTYPES if dtype != right.dtype and dtype not in also)
        if not is_first:
            yield from [] if "meta" in also else [right.to("meta")]
            yield torch.cat([right, right])
