"""Checks when a strategy is made, not when training starts: of its arguments and of Lightning's version."""

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import lightning as L

Refused = Mapping[str, tuple[Any, str]]
"""Names of arguments, the value that changes nothing, and what to do for other values."""

FABRIC_REFUSES: Refused = {
    "on_nonfinite_grad": ("ignore", "check the norm that fabric.clip_gradients returns"),
    "context_parallel_size": (1, "use lightning_liger.ContextParallel in your loop"),
}


_GIVEN_BY_LIGHTNING = {"self", "module", "device_id", "device_ids"}


def refuse(strategy: str, refused: Refused, **arguments: Any) -> None:
    """Raises ValueError if one of the ``refused`` arguments would change something."""
    for name, value in arguments.items():
        neutral, instead = refused[name]
        if value != neutral:
            raise ValueError(f"{strategy} does not support {name}={value!r}, only {neutral!r}: {instead}")


def refuse_unknown(strategy: str, arguments: Mapping[str, Any], *takers: Callable[..., Any]) -> None:
    """Raises TypeError for arguments that none of ``takers`` has, with similar names that one has.

    Lightning passes whatever a strategy does not know on to the engine, which sees it when the model is wrapped.
    """
    known = {name for taker in takers for name in inspect.signature(taker).parameters} - _GIVEN_BY_LIGHTNING
    for name in arguments:
        if name not in known:
            similar = difflib.get_close_matches(name, known)
            hint = f"; did you mean {' or '.join(map(repr, similar))}?" if similar else ""
            raise TypeError(f"{strategy} got an unexpected keyword argument {name!r}{hint}")


def check_overridden(strategy: object, names: Collection[str]) -> None:
    """Raises RuntimeError unless Lightning's classes have the private methods that ``strategy`` overrides.

    Lightning would never call an override of a method that it no longer has, and nothing would say so.
    """
    lightnings = [cls for cls in type(strategy).__mro__ if cls.__module__.partition(".")[0] == "lightning"]
    for name in names:
        if not any(name in vars(cls) for cls in lightnings):
            raise RuntimeError(
                f"{type(strategy).__name__} overrides {name}, which lightning {L.__version__} does not have: install a"
                " version that lightning-liger was tested with (lightning>=2.6.4,<2.7)"
            )
