"""Bad inputs and what users must see: the tables are ``bad_inputs_*.py`` files next to the tests of what they call."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent


class BadInput(NamedTuple):
    """One wrong call, and what its error must say."""

    id: str
    """Unique in its table: ``function-argument-what is wrong``."""
    call: Callable[..., Any]
    """Makes the call. If it has a parameter ``tmp_path``, it gets an empty folder."""
    mentions: tuple[str, ...]
    """What the message must contain (in any case): the argument, the value as a user wrote it, what was expected."""
    error: type[BaseException] | tuple[type[BaseException], ...] = (TypeError, ValueError)
    """SystemExit for the command line, whose message is what it prints to stderr and whose code must be 2."""
    unchanged: Callable[[], Any] | None = None
    """Returns what the call must leave as it is (compared with ``==``), such as a model's modules."""


def tables() -> Iterator[tuple[str, BadInput]]:
    """The dotted name of each table's module with each of its rows."""
    for path in sorted(ROOT.rglob("bad_inputs_*.py")):
        name = ".".join(("tests", *path.relative_to(ROOT).with_suffix("").parts))
        for bad_input in importlib.import_module(name).BAD_INPUTS:
            yield name, bad_input
