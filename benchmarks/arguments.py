"""Types of command-line arguments that several commands take."""

import argparse
from collections.abc import Callable, Collection


def names(what: str, known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """The ``type`` of an argument that is a comma-separated list of known names."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(name.strip() for name in text.split(",") if name.strip())
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no {what} {name!r}; known: {', '.join(known)}")
        return found

    return parse
