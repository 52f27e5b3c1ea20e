"""Options that are declared once: each by its type, which help and editors show, and which its value is checked by."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from liger_ops.arguments import check_bool, check_choice, check_integer, check_number, wrong_type


class Limits(NamedTuple):
    """The range of a number, in ``Annotated`` types."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None


Positive = Annotated[float, Limits(above=0)]
NonNegative = Annotated[float, Limits(at_least=0)]
Share = Annotated[float, Limits(at_least=0, at_most=1)]
Count = Annotated[int, Limits(at_least=1)]


@dataclass(frozen=True)
class Options:
    """Base of the options of a loss, which are checked as they are declared."""

    def __post_init__(self) -> None:
        check_declared(self)


def declared(cls: type) -> dict[str, Any]:
    """The types that ``cls`` and its bases declare, by name."""
    return {name: hint for base in reversed(cls.__mro__) for name, hint in inspect.get_annotations(base).items()}


def check_declared(owner: object, names: Iterable[str] | None = None) -> None:
    """Raises unless each attribute, or those named, is of its declared type and within the limits of that."""
    hints = declared(type(owner))
    for name in hints if names is None else names:
        check_value(name, getattr(owner, name), hints[name])


def is_options(hint: Any) -> bool:
    """Whether a declared type is that of a loss's options."""
    return isinstance(hint, type) and issubclass(hint, Options)


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raises unless ``value`` is a choice, number, bool or object as ``hint`` declares; other types are not checked."""
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    optional = NoneType in alternatives
    kinds = [kind for kind in alternatives if kind is not NoneType]
    if len(kinds) > 1 or (optional and value is None):
        return
    kind, limits = kinds[0], {}
    if get_origin(kind) is Annotated:
        kind, bounds = get_args(kind)
        limits = {side: bound for side, bound in bounds._asdict().items() if bound is not None}
    if get_origin(kind) is Literal:
        check_choice(name, value, (*((None,) if optional else ()), *get_args(kind)))
    elif kind is bool:
        check_bool(name, value, optional=optional)
    elif kind is int:
        check_integer(name, value, optional=optional, **limits)
    elif kind is float:
        check_number(name, value, optional=optional, **limits)
    elif is_options(kind) and not isinstance(value, kind):
        names = [each.__name__ for each in kind.__subclasses__()] or [kind.__name__]
        raise wrong_type(name, f"of {' or '.join(names)}", value)
