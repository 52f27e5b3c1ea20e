"""Misspelled arguments are refused when a strategy is made."""

import difflib
import inspect
from collections.abc import Callable, Collection
from typing import Any

_GIVEN_BY_LIGHTNING = {"self", "module", "device_id", "device_ids"}


def refuse_unknown(strategy: object, arguments: Collection[str], engine: Callable[..., Any] | None) -> None:
    """Raises TypeError for arguments that neither a class of ``strategy`` nor ``engine`` has, with similar names.

    Lightning passes whatever a strategy does not know on to the engine, which sees it when the model is wrapped.
    """
    if engine is None:  # Lightning's strategy refuses them
        return
    takers: list[Any] = [vars(cls)["__init__"] for cls in type(strategy).__mro__ if "__init__" in vars(cls)]
    known = {name for taker in (*takers, engine) for name in inspect.signature(taker).parameters} - _GIVEN_BY_LIGHTNING
    for name in arguments:
        if name not in known:
            similar = difflib.get_close_matches(name, known)
            hint = f"; did you mean {' or '.join(map(repr, similar))}?" if similar else ""
            raise TypeError(f"{type(strategy).__name__} got an unexpected keyword argument {name!r}{hint}")
