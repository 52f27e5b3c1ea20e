"""Subclasses of the classes of single objects, whose instances can be copied and pickled."""

import functools
from collections.abc import Callable, Hashable
from typing import Any


def made_subclass(make: Callable[..., type]) -> Callable[..., Any]:
    """Decorator of a function that makes a subclass, which no module has under its name.

    It is made once for the same arguments. Instances pickle by the function and its arguments, and so does an object
    whose class was changed to the subclass; the class of such an object must pickle in the default way.

    Args:
        make: A function of a module, with hashable arguments, which must pickle too. A ``__reduce_ex__`` that the
            subclass itself defines is replaced.
    """

    @functools.cache
    @functools.wraps(make)
    def subclass(*arguments: Hashable) -> type:
        made: Any = make(*arguments)

        def reduce(self: Any, protocol: Any) -> Any:
            # The state only: a class that was made of this one later, as FSDP2 does, is left out.
            reduced = super(made, self).__reduce_ex__(protocol)
            return _new, (subclass, arguments), *reduced[2:]

        made.__reduce_ex__ = reduce
        return made

    return subclass


def _new(subclass: Callable[..., type], arguments: tuple[Any, ...]) -> Any:
    made: Any = subclass(*arguments)
    return made.__new__(made)
